"""`kernel-agent derive --explain`: what a person can do about additions that stay atomic."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.cli.main import run
from kernel_agent.errors import ExitCode

SPARSE = '''"""Rows of blocks times a matrix in tiles, which each trip of a row picks by a number."""
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def sparse_kernel(X, VALUES, COLUMNS, STARTS, Y, COLS, B: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(tl.load(STARTS + row), tl.load(STARTS + row + 1)):
        column = tl.load(COLUMNS + k)
        block = tl.load(VALUES + k * B * B + i[:, None] * B + i[None, :])
        x = tl.load(X + column * B * B + i[:, None] * B + i[None, :])
        acc = tl.dot(block, x, acc)
    tl.store(Y + row * B * B + i[:, None] * B + i[None, :], acc)


@autodiff(inputs_require_grad=("x",))
def sparse(x, values, columns, starts):
    rows, B = starts.numel() - 1, values.shape[1]
    y = torch.empty((rows, B, B), dtype=x.dtype, device=x.device)
    sparse_kernel[(rows,)](x, values, columns, starts, y, x.shape[0], B=B)
    return y


SWEEP = [dict(rows=3, cols=4), dict(rows=4, cols=3)]


def make_args(rows, cols, device="cuda"):
    per_row = torch.randint(1, cols + 1, (rows,))
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    starts[1:] = per_row.cumsum(0)
    columns = torch.cat([torch.randperm(cols)[:count].sort().values for count in per_row.tolist()]).int()
    values = torch.randn(len(columns), 16, 16)
    return torch.randn(cols, 16, 16).to(device), values.to(device), columns.to(device), starts.to(device)
'''
LOADED = "tl.load(X + column * B * B + i[:, None] * B + i[None, :])"


@pytest.fixture
def explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What the command says of a forward, and the pair."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def explain(forward: str) -> tuple[str, str]:
        path = tmp_path / "sparse.py"
        path.write_text(forward)
        assert run(["derive", str(path), "--explain", "--no-tune", "--no-cache"]) == ExitCode.OK
        told = capsys.readouterr()
        return told.err, told.out

    return explain


def test_tiles_that_trips_pick_stay_atomic_for_a_reason_that_names_the_mask_to_write(explained):
    # The pass that gives such tiles owners kept its refusals to itself: `no sum over programs` was all there was.
    told, pair = explained(SPARSE)
    assert "tl.atomic_add(dX" in pair
    assert "`picked tiles of dX` is not had: no mask of what is loaded says how many tiles there are" in told
    assert "ask for `column < tiles`" in told


def test_with_that_mask_the_tiles_have_owners_and_nothing_is_refused(explained):
    # A remedy that changes nothing would send people in circles.
    told, pair = explained(SPARSE.replace(LOADED, LOADED[:-1] + ", mask=column < COLS, other=0.0)"))
    assert "tl.atomic_add(" not in pair
    assert "schedule: split" in told
    assert "picked tiles" not in told


def test_a_forward_whose_trips_pick_nothing_hears_nothing_of_picked_tiles(explained):
    # Most additions that stay atomic are not of this kind, and a line about each would hide the reason that counts.
    counted = SPARSE.replace("range(tl.load(STARTS + row), tl.load(STARTS + row + 1))", "range(0, COLS)")
    told, pair = explained(counted.replace("torch.randint(1, cols + 1, (rows,))", "torch.full((1,), cols)"))
    assert "tl.atomic_add(dX" in pair
    assert "picked tiles" not in told
