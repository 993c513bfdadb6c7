"""Rows of a packed batch belong to one sequence: its programs own them where the bounds never fall."""

from __future__ import annotations

import pytest
import torch
import triton
from schedule_kernels import add_to, block_of, made, matrix

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import Ownership, owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.lines import HELPERS

BLOCK = 4


def sequence(b: Builder, bounds: Value, last: int = 1) -> tuple[Value, Value]:
    """Begin and end of what a program works on; `last`: how far behind the begin the end is loaded from."""
    pid = b.program_id(0)
    return b.load(bounds, pid), b.load(bounds, b.add(pid, b.const(last)))


def rows_of_sequences(last: int = 1, masked: bool = True, back: int = 0) -> Kernel:
    """Each program adds to the rows of its sequence, tile after tile, from `back` rows before its begin on."""

    def build(b: Builder, x: Value, dx: Value, bounds: Value, width: Value) -> None:
        begin, end = sequence(b, bounds, last)

        def body(start: Value, _: list[Value]) -> list[Value]:
            rows, cols = b.add(start, b.arange(0, BLOCK, "BLOCK")), b.arange(0, BLOCK, "BLOCK")
            mask = b.expand(b.compare("lt", cols, width), 0)
            if masked:
                mask = b.logical_and(b.expand(b.compare("lt", rows, end), 1), mask)
            add_to(b, dx, matrix(b, rows, width, cols, b.const(1)), b.const(1.0, "f32"), mask)
            return []

        b.loop((b.sub(begin, b.const(back)), end, b.const(BLOCK, "i32", "BLOCK")), [], body)

    return made("X:*f32 dX:*f32 Bounds:*i32 width", build, BLOCK=BLOCK)


def own(kernel: Kernel, *calls: dict[str, object]) -> Ownership:
    return owned(kernel, {"X": "dX"}, Launch.like_forward(1, Calls(calls)))


def is_stored(found: Ownership) -> bool:
    return [op.code for op in found.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.STORE]


def test_rows_of_a_sequence_are_stored_if_the_bounds_rise() -> None:
    found = own(rows_of_sequences())
    assert is_stored(found)
    assert "bounds_rise(Bounds)" in [fact.expression for fact in found.facts]


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(rows_of_sequences(masked=False), id="the last tile goes beyond the end"),
        pytest.param(rows_of_sequences(last=2), id="the end is not the next begin"),
        pytest.param(rows_of_sequences(back=1), id="the first tile starts before the begin"),
    ],
)
def test_rows_that_another_sequence_may_have_stay_atomic(kernel: Kernel) -> None:
    # All that is missing is one of the facts by which a place tells its sequence.
    assert not is_stored(own(kernel))


def test_bounds_that_fall_in_a_call_that_was_seen_leave_the_rows_atomic() -> None:
    helpers: dict[str, object] = {}
    exec("\n".join(HELPERS.values()), helpers)
    rising, falling = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 5, 3, 8])
    assert is_stored(own(rows_of_sequences(), {**helpers, "Bounds": rising, "width": 4}))
    assert not is_stored(own(rows_of_sequences(), {**helpers, "Bounds": falling, "width": 4}))


def test_a_place_in_a_segment_bounded_by_the_smaller_of_two_numbers_is_one_all_the_same() -> None:
    # Padded tensors cut a sequence at its longest length: `place < min(length, longest)`.
    def build(b: Builder, x: Value, dx: Value, bounds: Value, longest: Value) -> None:
        begin, end = sequence(b, bounds)
        place = b.arange(0, BLOCK, "BLOCK")
        limit = b.elementwise(Code.MIN, (b.sub(end, begin), longest))
        add_to(b, dx, b.add(begin, place), b.const(1.0, "f32"), b.compare("lt", place, limit))

    assert is_stored(own(made("X:*f32 dX:*f32 Bounds:*i32 longest", build, BLOCK=BLOCK)))


# --- every row of the segments


def in_call(expression: str, **names: object) -> object:
    """What a condition is in a launch."""
    helpers: dict[str, object] = {"triton": triton}
    exec("\n".join(HELPERS.values()), helpers)
    return eval(expression, helpers, {"Bounds": torch.tensor([0, 3, 3, 8]), "grid0": 3, "BLOCK": BLOCK, **names})


def test_rows_of_all_sequences_are_every_row_if_the_bounds_say_so() -> None:
    found = own(rows_of_sequences()).empty_if["dX"]
    assert in_call(found, X=torch.empty(8, 4), width=4)
    # A row before the first sequence, one behind the last, a sequence without a program, a column without a lane.
    assert not in_call(found, X=torch.empty(8, 4), width=4, Bounds=torch.tensor([1, 3, 3, 8]))
    assert not in_call(found, X=torch.empty(9, 4), width=4)
    assert not in_call(found, X=torch.empty(8, 4), width=4, grid0=2)
    assert not in_call(found, X=torch.empty(8, 5), width=5)


def test_bounds_that_fall_or_lie_apart_count_no_row_twice() -> None:
    # [0, 8, 0, 8] has 16 rows, each of 8 twice: as a difference of the outer bounds they would be 8, all of X.
    found = own(rows_of_sequences()).empty_if["dX"]
    assert not in_call(found, X=torch.empty(8, 4), width=4, Bounds=torch.tensor([0, 8, 0, 8]))
    apart = torch.tensor([[0, 9], [3, 9], [3, 9], [8, 9]])[:, 0]
    assert not in_call(found, X=torch.empty(8, 4), width=4, Bounds=apart)


def dealt_out(step: int, condition: bool = False) -> Kernel:
    """Programs along axis 1 take turns at the tiles of a sequence; `step`: how many of them there are taken to be.
    `condition`: only where a row's number is less than `width`."""

    def build(b: Builder, x: Value, dx: Value, bounds: Value, width: Value) -> None:
        begin, end = sequence(b, bounds)
        block = b.const(BLOCK, "i32", "BLOCK")
        stride = b.mul(b.num_programs(1) if step == 0 else b.const(step), block)

        def body(start: Value, _: list[Value]) -> list[Value]:
            rows = b.add(start, b.arange(0, BLOCK, "BLOCK"))
            mask = b.compare("lt", rows, end)
            if condition:
                mask = b.logical_and(mask, b.compare("lt", rows, width))
            add_to(b, dx, rows, b.const(1.0, "f32"), mask)
            return []

        b.loop((b.add(begin, b.mul(b.program_id(1), block)), end, stride), [], body)

    return made("X:*f32 dX:*f32 Bounds:*i32 width", build, BLOCK=BLOCK)


def covered(kernel: Kernel) -> str:
    found = owned(kernel, {"X": "dX"}, Launch.like_forward(2))
    return found.empty_if.get("dX", "")


def test_programs_that_take_turns_at_a_sequence_reach_all_its_rows() -> None:
    found = covered(dealt_out(0))
    assert in_call(found, X=torch.empty(8), grid1=2)
    assert not in_call(found, X=torch.empty(9), grid1=2)


def test_programs_that_leave_out_tiles_of_a_sequence_are_not_taken_to_reach_them() -> None:
    # With two programs for steps of three tiles, each third tile is left out.
    found = covered(dealt_out(3))
    assert not found or not in_call(found, X=torch.empty(8), grid1=2)
    assert not covered(dealt_out(0, condition=True))


def counted(further: int) -> Kernel:
    """A loop over the number of tiles of a sequence, `(length + further) // BLOCK`."""

    def build(b: Builder, x: Value, dx: Value, bounds: Value) -> None:
        begin, end = sequence(b, bounds)
        block = b.const(BLOCK, "i32", "BLOCK")
        more = b.sub(block, b.const(BLOCK - further))

        def body(trip: Value, _: list[Value]) -> list[Value]:
            rows = b.add(b.add(begin, b.mul(trip, block)), b.arange(0, BLOCK, "BLOCK"))
            add_to(b, dx, rows, b.const(1.0, "f32"), b.compare("lt", rows, end))
            return []

        trips = b.elementwise(Code.FLOORDIV, (b.add(b.sub(end, begin), more), block))
        b.loop((b.const(0), trips, b.const(1)), [], body)

    return made("X:*f32 dX:*f32 Bounds:*i32", build, BLOCK=BLOCK)


def test_as_many_trips_as_a_sequence_has_tiles_reach_all_its_rows() -> None:
    # Rounded down, the last rows of a sequence have no tile, and would keep what memory held.
    found = covered(counted(BLOCK - 1))
    assert in_call(found, X=torch.empty(8))
    assert not in_call(found, X=torch.empty(9))
    assert not covered(counted(BLOCK - 2))
    assert not covered(counted(0))


def padded(b: Builder, x: Value, dx: Value, bounds: Value, longest: Value) -> None:
    """Programs along axis 1 own the places of a padded sequence."""
    begin, end = sequence(b, bounds)
    place = block_of(b, b.program_id(1), BLOCK, "BLOCK")
    limit = b.elementwise(Code.MIN, (b.sub(end, begin), longest))
    add_to(b, dx, b.add(begin, place), b.const(1.0, "f32"), b.compare("lt", place, limit))


def test_places_of_a_padded_sequence_are_all_its_rows_if_none_is_longer() -> None:
    found = covered(made("X:*f32 dX:*f32 Bounds:*i32 longest", padded, BLOCK=BLOCK))
    assert in_call(found, X=torch.empty(8), longest=5, grid1=2)
    # The sequence of five rows is cut at four, or has one tile of four places.
    assert not in_call(found, X=torch.empty(8), longest=4, grid1=2)
    assert not in_call(found, X=torch.empty(8), longest=5, grid1=1)


def joined(b: Builder, x: Value, dx: Value, bounds: Value, others: Value) -> None:
    """Each program goes through its sequence and one of another batch behind it, and adds to the rows of the first."""
    begin, end = sequence(b, bounds)
    length = b.sub(end, begin)
    first, last = sequence(b, others)

    def body(start: Value, _: list[Value]) -> list[Value]:
        place = b.add(start, b.arange(0, BLOCK, "BLOCK"))
        add_to(b, dx, b.add(begin, place), b.const(1.0, "f32"), b.compare("lt", place, length))
        return []

    b.loop((b.const(0), b.sub(b.add(length, last), first), b.const(BLOCK, "i32", "BLOCK")), [], body)


def test_a_loop_that_goes_on_into_another_sequence_reaches_all_rows_of_its_own_if_those_bounds_rise() -> None:
    found = covered(made("X:*f32 dX:*f32 Bounds:*i32 Others:*i32", joined, BLOCK=BLOCK))
    assert in_call(found, X=torch.empty(8), Others=torch.tensor([0, 2, 2, 3]))
    # Where the other bounds fall the loop ends before the last row of its own, which would keep what memory held.
    assert not in_call(found, X=torch.empty(8), Others=torch.tensor([0, 2, 4, 3]))
