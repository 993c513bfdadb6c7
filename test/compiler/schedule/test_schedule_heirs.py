"""Rows that an index names several times are summed by one program each, which goes through the sorted additions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
from schedule_kernels import add_to, made
from sorted_rows import run, stored_and_added, told
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import Listing
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.heirs import Heirs, inherited
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import Kernel, Value

ROWS, WIDTH, BLOCK = 11, 20, 8
PROGRAMS, TRIPS = 9, 3
ARGUMENTS = "X:*f32 Y:*f32 dX:*f32 Index:*i32 most trips width"


def scattered(*, of: str = "program", guarded: bool = False, shift: int = 0) -> Kernel:
    """Programs add rows of Y to the rows of dX that an index names: one each, or with `of="trip"` one in every trip.
    `guarded`: under a branch, where the index is at most `most`; `shift`: columns left out before the first."""

    def build(b: Builder, x: Value, y: Value, dx: Value, *numbers: Value) -> None:
        index, most, trips, width = numbers

        def row(number: Value) -> list[Value]:
            named = b.load(index, number)

            def columns(start: Value, _: list[Value]) -> list[Value]:
                cols = b.add(b.add(start, b.arange(0, BLOCK, "BLOCK")), b.const(shift))
                mask = b.compare("lt", cols, width)
                value = b.load(y, b.add(b.mul(number, width), cols), mask, b.const(0.0, "f32"))
                add_to(b, dx, b.add(b.mul(named, width), cols), value, mask)
                return []

            def all_columns() -> list[Value]:
                b.loop((b.const(0), width, b.const(BLOCK, "i32", "BLOCK")), [], columns)
                return []

            if guarded:
                b.branch(b.compare("le", named, most), all_columns, list)
            else:
                all_columns()
            return []

        if of == "program":
            row(b.program_id(0))
        else:
            number = b.mul(b.program_id(0), trips)
            b.loop((b.const(0), trips, b.const(1)), [], lambda trip, _: row(b.add(number, trip)))

    return made(ARGUMENTS, build, BLOCK=BLOCK)


def call(index: Tensor, programs: int = PROGRAMS, rows: int = ROWS) -> dict[str, Any]:
    return {
        "triton": triton,
        "X": torch.zeros(rows, WIDTH),
        "Y": torch.randn(len(index), WIDTH, dtype=torch.float64),
        "Index": index.int(),
        "BLOCK": BLOCK,
        "most": ROWS - 3,
        "trips": TRIPS,
        "width": WIDTH,
        "grid0": programs,
    }


def launch(*calls: Mapping[str, Any]) -> Launch:
    return Launch.like_forward(1, Calls(calls))


def heirs_of(kernel: Kernel, index: Tensor, programs: int = PROGRAMS) -> Heirs:
    found = inherited(kernel, "X", "dX", launch(call(index, programs)))
    assert found is not None
    return found


def summed(kernel: Kernel, index: Tensor, programs: int = PROGRAMS) -> tuple[Tensor, Tensor]:
    """What the owners of rows store to memory that held NaN, and what the forward's programs add."""
    return stored_and_added(kernel, heirs_of(kernel, index, programs), call(index, programs), (programs,))


def test_rows_that_are_named_several_times_or_never_have_the_sum_of_what_is_added_to_them() -> None:
    # A segment that begins one too late, or an order that is not that of the rows, changes sums; a row that nothing
    # names has to be zero though memory was not.
    index = torch.tensor([4, 0, 4, 4, 7, 0, 10, 9, 4])
    torch.testing.assert_close(*summed(scattered(), index))


def test_each_trip_has_a_number_of_its_own() -> None:
    # Were programs alone numbered, trips of one would list their rows over each other.
    index = torch.randint(0, ROWS, (PROGRAMS * TRIPS,))
    torch.testing.assert_close(*summed(scattered(of="trip"), index))


def test_additions_that_a_branch_leaves_out_are_left_out() -> None:
    # The owner asks no branch: a row must not be listed by a program that does not add to it.
    index = torch.tensor([ROWS - 1, 3, 3, ROWS - 2, 3, 0, ROWS - 1, 1, 2])
    torch.testing.assert_close(*summed(scattered(guarded=True), index))


def test_rows_that_are_none_of_the_tensor_are_listed_as_none() -> None:
    # Programs of a negative row, or of one beyond the last, must not be taken for those of another.
    found, given = heirs_of(scattered(), torch.zeros(PROGRAMS)), call(torch.tensor([-1, ROWS, 5]), 3)
    listing = found.listing
    assert isinstance(listing, Listing)
    rows = torch.full((3,), 99, dtype=torch.int32)
    scope = {**given, listing.rows.name: rows}
    run(listing.step.kernel, listing.step.grid, {**scope, **told(listing.step.scalars, scope)})
    assert rows.tolist() == [0, 0, 6]


def test_memory_is_asked_to_be_rows_one_behind_the_other() -> None:
    assert "X.is_contiguous()" in {fact.expression for fact in heirs_of(scattered(), torch.zeros(PROGRAMS)).facts}


def test_additions_whose_places_do_not_begin_with_the_row_are_refused() -> None:
    # With columns from 3 on, the last ones lie in the next row, which another program owns.
    with pytest.raises(CannotDerive, match="do not start with its first element"):
        heirs_of(scattered(shift=3), torch.zeros(PROGRAMS))


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((), id="nothing says how many add to a row"),
        pytest.param((call(torch.zeros(64), 64, 2),), id="many add to each of few rows"),
    ],
)
def test_rows_with_many_additions_each_stay_atomic(calls: tuple[dict[str, Any], ...]) -> None:
    # A program would do one after the other what all processors can share.
    with pytest.raises(CannotDerive, match="one addition after the other"):
        inherited(scattered(), "X", "dX", launch(*calls))
