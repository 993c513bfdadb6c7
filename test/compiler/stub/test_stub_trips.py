"""A loop that makes one trip at every entry of SWEEP is a loop all the same."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import derive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ODD = GateOptions(seeds=(0,), max_cases=40)
"""With sizes beyond those of SWEEP."""

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def length_kernel(X, Y, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * D + cols, mask=cols < D, other=0.0)
        squares += x * x
    tl.store(Y + row, tl.sqrt(tl.sum(squares, 0)))


@autodiff
def lengths(x):
    M, D = x.shape
    y = torch.empty(M, device=x.device)
    length_kernel[(M,)](x, y, D, BLOCK=64)
    return y


SWEEP = [dict(M=8, D=64), dict(M=3, D=32)]


def make_args(M, D, device="cuda"):
    return (torch.randn(M, D, device=device),)
"""


def test_a_row_of_one_tile_does_not_stand_for_longer_rows(tmp_path: Path, sandbox: Sandbox) -> None:
    # Triton writes a single trip out, and rows of 129 columns got the gradient of their first tile: red in the gate
    # under every schedule, although one look at that size shows the loop.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found = derive(describe(read_file(path), sandbox), sandbox, options=ODD)
    assert found.verdict.green, found.verdict.message
    assert "for start in range(0, D, BLOCK):" in found.draft.candidate.backward


WINDOW = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def window_kernel(X, W, Y, N, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = at - tap
        x = tl.load(X + place, mask=(place >= 0) & (at < N), other=0.0)
        total += x * tl.load(W + tap)
    tl.store(Y + at, total, mask=at < N)


@autodiff
def window(x, w):
    y = torch.empty_like(x)
    window_kernel[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), TAPS=w.numel(), BLOCK=16)
    return y


SWEEP = [dict(A=2, TAPS=3, B=4, C=6)]


def make_args(A, TAPS, B, C, device="cuda"):
    return torch.randn(A, B, C, device=device), torch.randn(TAPS, device=device)
"""


def test_every_size_that_the_gate_may_ask_for_is_looked_at(tmp_path: Path, sandbox: Sandbox) -> None:
    # Single gradients take the room of other sizes. A pair that spares none was asked at one more number of taps than
    # it was derived for, refused the call, and was red.
    path = tmp_path / "forward.py"
    path.write_text(WINDOW)
    few = GateOptions(seeds=(0, 1), max_elements=1 << 16, odd_sizes=3, max_cases=32)
    found = derive(describe(read_file(path), sandbox), sandbox, options=few)
    assert found.verdict.green, found.verdict.message
    assert "if TAPS == 1:" in found.draft.candidate.backward.replace("w.numel()", "TAPS")
