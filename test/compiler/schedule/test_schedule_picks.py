"""Tiles that trips pick, as memory says, are summed by one program each, which goes through the trips that did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from picked_tiles import listed, summed
from schedule_kernels import add_to, block_of, made, matrix
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.schedule.pickers import Pickers, pickers
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, Value

SIZE, D, HEADS, ROWS, T = 4, 4, 2, 5, 18
"""Programs along the grid are rows and heads; the last tile of T rows has no more than two."""
TILES = -(-T // SIZE)


def sparse(
    *, bounded: bool = True, padded: bool = False, early: bool = False, per_trip: bool = False, carried: bool = False
) -> Kernel:
    """Programs add A B to the tile of dX that each of their trips picks; where trips begin and end memory has.

    `bounded`: masks say which rows there are. `padded`: and that nothing is added to a tile below 0. `early`: no trips
    where a number of the row is less than 0. `per_trip`: addresses depend on the trip, too. `carried`: what is added
    depends on earlier trips.
    """

    def build(b: Builder, x: Value, a: Value, c: Value, dx: Value, begins: Value, picks: Value, *rest: Value) -> None:
        keep, length = rest
        row, head = b.program_id(0), b.program_id(1)
        place = b.add(b.mul(head, b.num_programs(0)), row)
        lanes, cols = b.arange(0, SIZE, "SIZE"), b.arange(0, D, "D")

        def trip(index: Value, inner: list[Value]) -> list[Value]:
            tile = b.load(picks, index)
            rows = b.add(b.mul(tile, b.const(SIZE, "i32", "SIZE")), lanes)
            rows = b.add(rows, index) if per_trip else rows
            mask = b.expand(b.compare("lt", rows, length), 1) if bounded else None
            if padded and mask is not None:
                mask = b.logical_and(mask, b.compare("ge", tile, b.const(0)))
            left = b.load(a, matrix(b, block_of(b, place, SIZE, "SIZE"), b.const(D), cols, b.const(1)))
            right = b.load(c, matrix(b, block_of(b, index, D, "D"), b.const(D), cols, b.const(1)))
            value = b.add(b.dot(left, right, "ieee"), *inner) if carried else b.dot(left, right, "ieee")
            add_to(b, dx, matrix(b, b.add(b.mul(head, length), rows), b.const(D), cols, b.const(1)), value, mask)
            return [value] if carried else []

        def trips() -> list[Value]:
            first, last = b.load(begins, place), b.load(begins, b.add(place, b.const(1)))
            start = [b.whole(b.const(0.0, "f32"), (SIZE, D))] if carried else []
            b.loop((first, last, b.const(1)), start, trip)
            return []

        if early:
            b.branch(b.compare("ge", b.load(keep, row), b.const(0)), trips, list)
        else:
            trips()

    arguments = "X:*f32 A:*f32 C:*f32 dX:*f32 Begins:*i32 Picks:*i32 Keep:*i32 length"
    return made(arguments, build, SIZE=SIZE, D=D)


def call(counts: list[int], picked: list[int], keep: list[int] | None = None) -> dict[str, Any]:
    return {
        "triton": triton,
        "torch": torch,
        "X": torch.zeros(HEADS * T, D),
        "A": torch.randn(HEADS * ROWS * SIZE, D, dtype=torch.float64),
        "C": torch.randn(len(picked) * D, D, dtype=torch.float64),
        "Begins": torch.tensor([0, *counts]).cumsum(0).int(),
        "Picks": torch.tensor(picked).int(),
        "Keep": torch.tensor(keep or [0] * ROWS).int(),
        "SIZE": SIZE,
        "D": D,
        "length": T,
        "grid0": ROWS,
        "grid1": HEADS,
    }


COUNTS = [3, 0, 2, 5, 1, 0, 4, 1, 2, 2]
PICKED = [0, 4, 2, 2, 0, 1, 0, 4, 4, 2, 0, 1, 1, 1, 4, 0, 0, 4, 4, 1]
"""Nothing of the first head picks tile 3, and nothing of the second tiles 2 and 3."""


def owners(kernel: Kernel, given: dict[str, Any]) -> Pickers:
    return pickers(kernel, {"X": "dX"}, Launch.like_forward(2, Calls((given,))))


def sums(kernel: Kernel, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return summed(kernel, owners(kernel, given), given, (ROWS, HEADS))


def test_tiles_have_the_products_of_all_trips_that_pick_them_and_zero_where_none_does() -> None:
    # Were trips numbered by the row alone, or with room for the first row's, the owner of a tile would take another
    # head's products or those of a trip that is not there; tiles that nothing picks held NaN.
    torch.testing.assert_close(*sums(sparse(), call(COUNTS, PICKED)))


def test_programs_without_trips_have_none_in_the_list() -> None:
    # The owner asks no branch: programs that make no trip must not be listed with what they would pick.
    torch.testing.assert_close(*sums(sparse(early=True), call(COUNTS, PICKED, keep=[1, 1, 1, -1, 1])))


def test_no_trip_at_all_leaves_zeros() -> None:
    # There is room for one trip then: a list without any would have no first element to be looked up.
    torch.testing.assert_close(*sums(sparse(), call([0] * len(COUNTS), [0])))


def test_tiles_behind_the_last_are_listed_as_none() -> None:
    # Their rows fail the mask in the forward; the number of one is that of a tile of the next head.
    picked = [TILES if place % 3 == 0 else tile for place, tile in enumerate(PICKED)]
    torch.testing.assert_close(*sums(sparse(), call(COUNTS, picked)))


def test_a_number_below_zero_raises() -> None:
    # Its rows pass the mask: in the forward they are those of the head before, and no owner would add to them.
    given = call(COUNTS, [-1, *PICKED[1:]])
    with pytest.raises(ValueError, match="below 0"):
        listed(owners(sparse(), given), given)


def test_numbers_below_zero_that_a_mask_leaves_out_are_listed_as_none() -> None:
    # Rows of a layout are often padded with -1: a backward that raised there would refuse what its forward takes.
    picked = [-1 if place % 3 == 0 else tile for place, tile in enumerate(PICKED)]
    torch.testing.assert_close(*sums(sparse(padded=True), call(COUNTS, picked)))


def test_where_any_call_must_be_taken_the_mask_has_to_leave_them_out() -> None:
    # Later calls may pick what no call of SWEEP did, and must not raise then.
    calls = Calls((call(COUNTS, PICKED),), typical=False)
    assert pickers(sparse(padded=True), {"X": "dX"}, Launch.like_forward(2, calls)).kernel.ops
    with pytest.raises(CannotDerive, match="later call"):
        pickers(sparse(), {"X": "dX"}, Launch.like_forward(2, calls))


def test_owners_load_once_what_depends_on_their_tile_alone() -> None:
    # Read with every trip again, a tile of keys would be loaded as often as it is picked.
    def build(b: Builder, x: Value, c: Value, dx: Value, begins: Value, picks: Value, length: Value) -> None:
        lanes, cols, row = b.arange(0, SIZE, "SIZE"), b.arange(0, D, "D"), b.program_id(0)

        def trip(index: Value, _: list[Value]) -> list[Value]:
            rows = b.add(b.mul(b.load(picks, index), b.const(SIZE, "i32", "SIZE")), lanes)
            at, mask = matrix(b, rows, b.const(D), cols, b.const(1)), b.expand(b.compare("lt", rows, length), 1)
            right = b.load(c, matrix(b, block_of(b, row, D, "D"), b.const(D), cols, b.const(1)))
            add_to(b, dx, at, b.dot(b.load(x, at, mask, b.const(0.0, "f32")), right, "ieee"), mask)
            return []

        bounds = (b.load(begins, row), b.load(begins, b.add(row, b.const(1))), b.const(1))
        b.loop(bounds, [], trip)

    kernel = made("X:*f32 C:*f32 dX:*f32 Begins:*i32 Picks:*i32 length", build, SIZE=SIZE, D=D)
    found = pickers(kernel, {"X": "dX"}, Launch.like_forward(1, Calls((call(COUNTS, PICKED),))))
    (loop,) = [op for op in found.kernel.ops if op.code is Code.FOR]
    assert {op.base.name for op in loop.blocks[0].ops if op.code is Code.LOAD} == {"C", "dX_order"}


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        pytest.param(sparse(per_trip=True), "do not depend on one number", id="addresses that depend on the trip"),
        pytest.param(sparse(carried=True), "changes from trip to trip", id="sums of earlier trips"),
    ],
)
def test_what_is_no_sum_over_tiles_is_left_to_atomics(kernel: Kernel, why: str) -> None:
    # An owner that took the first's tiles for apart, or the second's trips for each other's peers, would store another
    # sum.
    with pytest.raises(CannotDerive, match=why):
        owners(kernel, call(COUNTS, PICKED))


def test_tiles_that_overlap_are_left_to_atomics() -> None:
    # Tiles of SIZE rows whose numbers count every second row have rows in common.
    def build(b: Builder, x: Value, c: Value, dx: Value, begins: Value, picks: Value, length: Value) -> None:
        lanes, cols, row = b.arange(0, SIZE, "SIZE"), b.arange(0, D, "D"), b.program_id(0)

        def trip(index: Value, _: list[Value]) -> list[Value]:
            rows = b.add(b.mul(b.load(picks, index), b.const(2)), lanes)
            right = b.load(c, matrix(b, block_of(b, row, D, "D"), b.const(D), cols, b.const(1)))
            at, mask = matrix(b, rows, b.const(D), cols, b.const(1)), b.expand(b.compare("lt", rows, length), 1)
            add_to(b, dx, at, b.dot(right, right, "ieee"), mask)
            return []

        b.loop((b.load(begins, row), b.load(begins, b.add(row, b.const(1))), b.const(1)), [], trip)

    kernel = made("X:*f32 C:*f32 dX:*f32 Begins:*i32 Picks:*i32 length", build, SIZE=SIZE, D=D)
    found = pickers(kernel, {"X": "dX"}, Launch.like_forward(1, Calls((call(COUNTS, PICKED),))))
    stored = owned(prune(found.kernel), {"X": "dX"}, found.launch)
    assert [op.code for op in stored.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.ATOMIC_ADD]


def test_tiles_without_an_end_are_left_to_atomics() -> None:
    # Rows of one head would go on where those of the next begin.
    found = owners(sparse(bounded=False), call(COUNTS, PICKED))
    stored = owned(prune(found.kernel), {"X": "dX"}, found.launch)
    assert [op.code for op in stored.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.ATOMIC_ADD]


def test_loops_whose_trips_the_launch_counts_are_not_asked() -> None:
    # Rows of such have lists without a launch that counts, and their own refusals of crowds.
    def build(b: Builder, x: Value, c: Value, dx: Value, picks: Value, length: Value) -> None:
        def trip(index: Value, _: list[Value]) -> list[Value]:
            rows = b.add(b.mul(b.load(picks, index), b.const(SIZE)), b.arange(0, SIZE, "SIZE"))
            add_to(b, dx, rows, b.load(c, rows), b.compare("lt", rows, length))
            return []

        b.loop((b.const(0), length, b.const(1)), [], trip)

    kernel = made("X:*f32 C:*f32 dX:*f32 Picks:*i32 length", build, SIZE=SIZE)
    with pytest.raises(DoesNotApply, match="before the launch"):
        pickers(kernel, {"X": "dX"}, Launch.like_forward(1, Calls((call(COUNTS, PICKED),))))
