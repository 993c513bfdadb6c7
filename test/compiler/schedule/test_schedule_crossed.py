"""Tiles of one tensor along two axes of the grid: an owner does what the program across adds to its tile as well."""

from __future__ import annotations

from typing import Any

import pytest
import schedule_forwards
import torch
import triton
from schedule_plans import Made, agree, atomics, named_source, run

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.code import Code

TILES = {"BM": 16, "B": 32}


def products(*grid: int) -> Made:
    """Plans, where one call was seen on a grid."""
    types = {"x_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32", "m": "i32"}
    kernel = named_source(schedule_forwards.columns_with_columns, types, **TILES)
    seen: dict[str, Any] = {"x_ptr": torch.empty(40, 70), "n": 70, "m": 40, "triton": triton, **TILES}
    seen |= {f"grid{axis}": extent for axis, extent in enumerate(grid)}
    adjoint = differentiate(kernel, read=frozenset(("x_ptr",)), written=frozenset(("o_ptr",)))
    return {plan.schedule: plan for plan in plans(kernel, adjoint, 2, calls=Calls((seen,)))}


@pytest.mark.parametrize(("n", "m"), [(64, 32), (70, 40), (1, 1)])
def test_an_owner_adds_what_programs_on_both_sides_of_the_diagonal_add_to_its_columns(n: int, m: int) -> None:
    # The cotangent is not symmetric: an owner that left out either side, or took one twice, would give another sum.
    found = products(3, 3)
    assert atomics(found["split"]) == []
    torch.manual_seed(0)
    x, do = torch.randn(m, n, dtype=torch.float64), torch.randn(n, n, dtype=torch.float64)
    grid = (-(-n // 32),) * 2
    agree(found, {"x_ptr": x, "n": n, "m": m}, {"o_ptr": do}, grid, **TILES)
    gradients, counts = run(found["split"], {"x_ptr": x, "n": n, "m": m}, {"o_ptr": do}, grid, **TILES)
    torch.testing.assert_close(gradients["x_ptr"], x @ (do + do.T))
    assert counts[-1].owned("dx")


def test_both_sides_are_one_loop_that_loads_its_columns_once() -> None:
    # As two loops, or as two sums of tiles of which one lies turned, they would load the other columns twice.
    (step,) = products(3, 3)["split"].steps
    assert sum(op.code is Code.FOR for op in step.kernel.ops) == 1
    assert sum(op.code is Code.LOAD and op.base.name == "x_ptr" for op in step.kernel.ops) == 1


def test_a_grid_that_is_longer_than_wide_is_not_crossed() -> None:
    # Programs of the third row would do what nobody across the diagonal has.
    assert all("dx" in atomics(plan) for plan in products(3, 2).values())


def test_that_the_grid_is_as_long_as_it_is_wide_is_checked_in_every_call() -> None:
    # What one call had says nothing of the next.
    assert "grid0 == grid1" in {fact.expression for fact in products(3, 3)["split"].facts}
