"""Programs that have runs of tiles, `(chunk * each + trip) // across` and the remainder: stored once, and counted."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import atomics, named_source, plans_of, run


@triton.jit
def tiles(X, Y, N, L, count, each, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    across = tl.cdiv(L, BLOCK)
    for tile in range(chunk * each, tl.minimum((chunk + 1) * each, count)):
        n = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
        at = tile % across * BLOCK + tl.arange(0, BLOCK)
        mask = (n[:, None] < N) & (at[None, :] < L)
        x = tl.load(X + n[:, None] * L + at[None, :], mask=mask, other=0.0)
        tl.store(Y + n[:, None] * L + at[None, :], x * x, mask=mask)


@pytest.mark.parametrize("count", [6, 5])
def test_runs_of_tiles_are_stored_once_and_counted(count: int) -> None:
    # The number of a tile is one of a run: nothing said that `each` is no less than 0, though there is a trip. With a
    # tile too few, memory that is not stored to must start as zeros.
    types = {"X": "*fp32", "Y": "*fp32", **dict.fromkeys(("N", "L", "count", "each"), "i32")}
    made = plans_of(named_source(tiles, types, BLOCK_N=2, BLOCK=4), "X", "Y", 1)
    assert atomics(made["owned"]) == []
    (buffer,) = made["owned"].buffers
    given = {"X": torch.randn(6, 8, dtype=torch.float64), "N": 6, "L": 8, "count": count, "each": 2}
    scope = {**given, "grid0": 3, "BLOCK_N": 2, "BLOCK": 4, "triton": triton}
    assert eval(buffer.empty_if, scope) == (count == 6)
    cotangent = torch.randn(6, 8, dtype=torch.float64)
    found, _ = run(made["owned"], given, {"Y": cotangent}, (3,), BLOCK_N=2, BLOCK=4)
    wanted = 2 * given["X"] * cotangent
    if count == 5:
        wanted[4:, 4:] = 0.0
    torch.testing.assert_close(found["X"], wanted)
    given["each"] = 1
    assert not eval(buffer.empty_if, {**scope, "each": 1})
