"""Online softmaxes whose lanes have maxima of their own, which meet behind the loop: the log-sum-exp is one for all."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from saved_checks import Backward, Forward, empty, kernel_from, ran, same_gradients, seeded

from kernel_agent.compiler.saved.prepare import prepared

ROWS, COLS = 13, 5
BOUNDS = (0, 3, 3, 13)
"""The second of three segments has no rows."""


@triton.jit
def segment_lse(
    x_ptr, bounds_ptr, y_ptr, lse_ptr, n, GUARD: tl.constexpr, TWICE: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.load(bounds_ptr + segment)
    end = tl.load(bounds_ptr + segment + 1)
    top = tl.full((BLOCK_R, BLOCK_C), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        mask = (row < end)[:, None] & (col < n)[None, :]
        x = tl.load(x_ptr + row[:, None] * n + col[None, :], mask=mask, other=-float("inf"))
        new = tl.maximum(top, x)
        total = total * tl.exp(top - new) + tl.exp(x - new)
        top = new
    high = tl.max(top, 0)
    away = top - high[None, :]
    mass = tl.sum(total * tl.exp(2 * away if TWICE else away), 0)
    if GUARD:
        mass = tl.where(mass > 0.0, mass, 1.0)
    lse = tl.where(end > first, high + tl.log(mass), -float("inf"))
    tl.store(y_ptr + segment * n + col, tl.exp(0.5 * lse) if GUARD else 2.0 * lse, mask=col < n)
    tl.store(lse_ptr + segment * n + col, lse, mask=col < n - SHORT)


def _segment_lse(*, guard: bool = True, twice: bool = False, short: int = 0) -> Forward:
    types = {**dict.fromkeys(("x_ptr", "y_ptr", "lse_ptr"), "*fp32"), "bounds_ptr": "*i32", "n": "i32"}
    kernel = kernel_from(segment_lse, types, GUARD=guard, TWICE=twice, SHORT=short, BLOCK_R=4, BLOCK_C=4)
    segments = len(BOUNDS) - 1
    given = {
        "x_ptr": 3 * seeded(ROWS, COLS), "bounds_ptr": torch.tensor(BOUNDS), "y_ptr": empty(segments, COLS),
        "lse_ptr": empty(segments, COLS), "n": COLS,
    }  # fmt: skip
    return ran(kernel, (segments, 2), given, ["x_ptr"], ["y_ptr"])


def _backward_of(forward: Forward) -> Backward:
    """With what the forward stored; it is the gradient of the forward as it is."""
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    return backward


@pytest.mark.parametrize("guard", [False, True], ids=["bare", "guarded"])
def test_lanes_that_meet_behind_the_loop_take_the_log_sum_exp_of_all(guard: bool) -> None:
    # Without it each lane has to find its maximum again, and on the way back what all trips before rescaled. A segment
    # without rows has minus infinity there: as a maximum that would make infinities of lanes that count for nothing.
    backward = _backward_of(_segment_lse(guard=guard))
    assert backward.tapes == 0
    assert backward.loads("x_ptr") == ROWS * COLS
    assert backward.loads("lse_ptr") == COLS * (len(BOUNDS) - 1)


def test_lanes_that_are_weighed_otherwise_keep_their_maxima() -> None:
    # The sum is not that of exp(x - high) then, and no number makes it 1.
    assert _backward_of(_segment_lse(twice=True)).tapes > 0


def test_a_log_sum_exp_that_is_not_stored_for_all_columns_is_not_taken() -> None:
    # The last column is in the result, but its log-sum-exp is not in memory: there was NaN.
    assert _backward_of(_segment_lse(short=1)).loads("lse_ptr") == 0
