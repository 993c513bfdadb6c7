"""Forwards that walk through rows in tiles have whole rows in one, where that computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import atomics, named_source, run

from kernel_agent.compiler.planning import Wanted, planned
from kernel_agent.compiler.schedule.calls import Calls, Entry
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.onetile import widened
from kernel_agent.compiler.schedule.unstepped import WholeRows
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

M, N = 5, 20
TYPES = {"x_ptr": "*fp32", "w_ptr": "*fp32", "y_ptr": "*fp32", "s_ptr": "*fp32", "n": "i32"}


@triton.jit
def scaled_rows(x_ptr, w_ptr, y_ptr, s_ptr, n, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """y = w (x - mean) / (1 + sum of x^2), a tile of columns at a time. HOW: what a tile is there for, too."""
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    if HOW == 1:  # all lanes of a tile count
        sums += 1.0
    square, most = 0.0, 0.0
    for start in range(0, n, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=1.0 if HOW == 2 else 0.0)
        sums += x * lanes if HOW == 3 else x
        square += tl.sum(x * x, 0)
        if HOW == 4:
            most = tl.maximum(most, tl.sum(x, 0))
        if HOW == 5:
            tl.store(s_ptr + row * n + start // BLOCK, tl.sum(x, 0))
        if HOW == 6:
            square += BLOCK
    mean = tl.sum(sums, 0) / n + most
    for start in range(0, n, BLOCK):
        cols = start + lanes
        mask = cols < n - 1 if HOW == 7 else cols < n
        x = tl.load(x_ptr + row * n + cols, mask=mask)
        w = tl.load(w_ptr + (lanes if HOW == 8 else cols), mask=mask)
        y = w * (x - mean) / (1.0 + square)
        if HOW == 9:
            y -= tl.sum(tl.where(mask, y, 0.0), 0)
        tl.store(y_ptr + row * n + cols, y, mask=mask)


def kernel(how: int = 0) -> Kernel:
    return named_source(scaled_rows, TYPES, HOW=how, BLOCK=32)


def calls(asked: int = N) -> Calls:
    seen: dict[str, Any] = {"n": N, "grid0": M, "triton": triton, "BLOCK": 32}
    seen |= {name: torch.empty(M, N) for name in ("x_ptr", "y_ptr", "s_ptr")} | {"w_ptr": torch.empty(N)}
    return Calls((seen,), swept=(Entry({"n": N}, {"n": asked}),))


def whole(source: Kernel, asked: int = N) -> WholeRows | None:
    return widened(source, Launch.like_forward(1, calls(asked)))


def test_a_row_in_one_tile_is_not_walked_through() -> None:
    found = whole(kernel())
    assert found is not None
    assert (found.name, found.width) == ("ALL_BLOCK", "max(BLOCK, triton.next_power_of_2(n))")
    assert not any(op.code is Code.FOR for op in found.kernel.ops)
    assert set(found.kernel.extents.values()) == {"ALL_BLOCK"}


def test_sums_over_rows_of_a_forward_that_walks_through_them_stay_in_registers() -> None:
    # Layer norms of long rows are written so. Each trip has other columns of the weight's gradient: all programs added
    # to it atomically, 67 million times for 4,096 rows of 8,192 columns.
    plan = planned("rows", Wanted(kernel(), 1, calls(), frozenset(("x_ptr", "w_ptr")), frozenset(("y_ptr",))))
    assert plan.schedule == "rows"
    assert not atomics(plan)
    assert plan.settings["ALL_BLOCK"] == "max(BLOCK, triton.next_power_of_2(n))"
    torch.manual_seed(0)
    x, w, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((M, N), (N,), (M, N)))
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    y = leaves[1] * (leaves[0] - leaves[0].mean(1, keepdim=True)) / (1 + leaves[0].square().sum(1, keepdim=True))
    given = {"x_ptr": x, "w_ptr": w, "y_ptr": y.detach(), "s_ptr": torch.zeros_like(x), "n": N}
    found, _ = run(plan, given, {"y_ptr": dy}, (M,), HOW=0, BLOCK=32)
    dx, dw = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(found["x_ptr"], dx)
    torch.testing.assert_close(found["w_ptr"], dw)


@pytest.mark.parametrize("how", range(1, 10))
def test_tiles_that_are_there_for_more_than_columns_stay(how: int) -> None:
    # Of a wider tile other lanes would count, or as many fewer tiles: 1 and 2 sum what lies behind a row, 3 and 8 know
    # the lane of a tile, 4, 5 and 9 sum one tile alone, 6 counts them, 7 leaves a column out.
    assert whole(kernel(how)) is None


def test_rows_that_are_too_long_for_a_tile_or_of_unknown_length_are_walked_through() -> None:
    assert whole(kernel(), 16384) is not None
    assert whole(kernel(), 16385) is None
    assert widened(kernel(), Launch.like_forward(1, Calls(calls().names))) is None


def test_a_tile_that_the_kernel_was_unrolled_for_stays() -> None:
    # What was lowered for one size is not what runs with another.
    source = kernel()
    source.fixed = frozenset(("BLOCK",))
    assert whole(source) is None
