"""What programs add to the same few elements is stored to rows of their own, which torch sums."""

from __future__ import annotations

import pytest
import torch
from schedule_kernels import add_to, made

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.slots import Slotted, slotted
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

WIDE, CHANNELS, ROWS, GROUPS = 32, 5, 3, 2


def channel_sums(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
    """Programs (channel, row, group) add the sum of their part of X to their channel's element of dW."""
    channel, row, group = (b.program_id(axis) for axis in range(3))
    part = b.add(b.mul(b.add(b.mul(group, b.num_programs(1)), row), channels), channel)
    at = b.add(b.mul(part, b.const(WIDE, "i32", "WIDE")), b.arange(0, WIDE, "WIDE"))
    add_to(b, dw, channel, b.sum(b.load(x, at), 0))


def kernel(build: object = channel_sums) -> Kernel:
    return made("X:*f32 W:*f32 dW:*f32 channels", build, WIDE=WIDE)  # type: ignore[arg-type]


def slot(source: Kernel) -> Slotted:
    return slotted(source, {"W": "dW"}, Launch.like_forward(3))


def writes(source: Kernel) -> list[Code]:
    return [op.code for op in source.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)]


def test_rows_of_all_programs_add_up_to_the_gradient() -> None:
    # Rows that two programs share, or a stride that is not the width, would lose sums.
    found = slot(kernel())
    assert writes(found.kernel) == [Code.STORE]
    (one,) = found.slots
    assert one.axes == (1, 2)
    assert one.buffer.shape == ("grid1 * grid2", "W.numel()")
    assert [fact.expression for fact in one.facts] == ["W.is_contiguous()"]
    x = torch.randn(GROUPS, ROWS, CHANNELS, WIDE, dtype=torch.float64)
    rows = torch.full((ROWS * GROUPS, CHANNELS), torch.nan, dtype=torch.float64)
    given = {"X": x, one.buffer.name: rows, "channels": CHANNELS, one.width: CHANNELS, "W": rows[0]}
    evaluate(
        found.kernel, (CHANNELS, ROWS, GROUPS), {value.name: given[value.name] for value in found.kernel.arguments}
    )
    torch.testing.assert_close(rows.sum(0), x.sum((0, 1, 3)))


def test_rows_that_are_stored_as_a_whole_may_start_empty() -> None:
    (one,) = slot(kernel()).slots
    assert one.buffer.empty_if == "W.numel() == grid0"


def test_a_weight_with_gaps_in_a_call_that_was_seen_has_no_rows() -> None:
    # Rows have the weight's elements side by side: the backward would refuse that call.
    calls = Calls(({"W": torch.ones(2 * CHANNELS)[::2]},))
    assert slotted(kernel(), {"W": "dW"}, Launch.like_forward(3, calls)).slots == ()


def test_a_part_of_a_fact_that_cannot_be_asked_does_not_hide_one_that_fails() -> None:
    # A plan's own numbers are in no call: beside them a condition on sizes went for true, and a batchnorm's gradient
    # had a row of its own size for each of 528 programs.
    calls = Calls(({"R": 6, "C": 3},))
    assert calls.refute(("programs * R >= C and R == C",))
    assert not calls.refute(("programs * R >= C and R == 2 * C",))


def test_a_condition_that_differs_between_programs_leaves_the_zeros() -> None:
    # Programs that a mask keeps from storing leave their rows as they were: empty memory would be summed.
    def build(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
        channel, row = b.program_id(0), b.program_id(1)
        value = b.sum(b.load(x, b.arange(0, WIDE, "WIDE")), 0)
        add_to(b, dw, channel, value, b.compare("lt", row, channels))

    (one,) = slot(kernel(build)).slots
    assert one.buffer.empty_if == ""


def test_programs_that_come_back_to_a_channel_have_rows_by_turn() -> None:
    # Seven programs over five channels: the second turn has two, and its other elements stay zeros.
    def build(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
        pid = b.program_id(0)
        at = b.add(b.mul(pid, b.const(WIDE, "i32", "WIDE")), b.arange(0, WIDE, "WIDE"))
        add_to(b, dw, b.elementwise(Code.REM, (pid, channels)), b.sum(b.load(x, at), 0))

    found = slotted(kernel(build), {"W": "dW"}, Launch.like_forward(1))
    assert writes(found.kernel) == [Code.STORE]
    (one,) = found.slots
    assert one.buffer.shape[0] == "triton.cdiv(grid0, channels)"
    assert one.buffer.empty_if == ""
    assert "channels >= 1" in [fact.expression for fact in one.facts]
    x = torch.randn(7, WIDE, dtype=torch.float64)
    rows = torch.zeros(2, CHANNELS, dtype=torch.float64)
    given = {"X": x, one.buffer.name: rows, "channels": CHANNELS, one.width: CHANNELS, "W": rows[0]}
    evaluate(found.kernel, (7,), {value.name: given[value.name] for value in found.kernel.arguments})
    wanted = torch.zeros(CHANNELS, dtype=torch.float64).index_add(0, torch.arange(7) % CHANNELS, x.sum(1))
    torch.testing.assert_close(rows.sum(0), wanted)


@pytest.mark.parametrize("lanes", [4, 32])
def test_rows_as_large_as_what_is_read_stay_atomic(lanes: int) -> None:
    # Such a buffer would be as large as the input in float32.
    def build(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
        at = b.add(b.mul(b.program_id(0), b.const(lanes)), b.arange(0, lanes))
        add_to(b, dw, b.arange(0, lanes), b.load(x, at))

    assert slot(kernel(build)).slots == ()


@pytest.mark.parametrize(("wide", "is_stored"), [((32,), True), ((32, 64), True), ((32, 4), True), ((4, 8), False)])
def test_rows_are_small_beside_what_is_read_at_the_tiles_of_all_calls(wide: tuple[int, ...], is_stored: bool) -> None:
    # The kernel is lowered for the first call, whose tiles may be the odd ones: rows as large as what is read were had.
    calls = Calls(tuple({"grid0": 5, "grid1": 3, "grid2": 40, "W": torch.zeros(5), "WIDE": one} for one in wide))
    found = slotted(kernel(), {"W": "dW"}, Launch.like_forward(3, calls))
    assert (writes(found.kernel) == [Code.STORE]) is is_stored


def test_elements_that_lanes_share_stay_atomic() -> None:
    # Only programs have rows of their own: lanes that meet in one would overwrite each other.
    def build(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
        value = b.load(x, b.arange(0, WIDE * WIDE))
        cols = b.elementwise(Code.FLOORDIV, (b.arange(0, 2), b.const(2)))
        add_to(b, dw, cols, b.sum(value, 0))

    assert slot(kernel(build)).slots == ()


def test_additions_in_a_loop_stay_atomic() -> None:
    def build(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
        value = b.sum(b.load(x, b.arange(0, WIDE, "WIDE")), 0)

        def body(off: Value, _: object) -> list[Value]:
            add_to(b, dw, off, value)
            return []

        b.loop((b.const(0), channels, b.const(1)), [], body)

    assert slot(kernel(build)).slots == ()


STEPS, LANES = 4, 2


def states(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
    """Programs of one axis each add their part of X to all steps of dW, in a loop, as those of a recurrent state do."""
    lanes = b.arange(0, LANES, "LANES")

    def body(step: Value, _: list[Value]) -> list[Value]:
        at = b.add(b.mul(step, b.const(LANES, "i32", "LANES")), lanes)
        part = b.mul(b.program_id(0), b.const(STEPS * LANES))
        add_to(b, dw, at, b.load(x, b.add(part, at)))
        return []

    b.loop((b.const(0), b.const(STEPS), b.const(1)), [], body)


def shared_states(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
    """Such programs that all read the same X."""
    lanes = b.arange(0, LANES, "LANES")

    def body(step: Value, _: list[Value]) -> list[Value]:
        at = b.add(b.mul(step, b.const(LANES, "i32", "LANES")), lanes)
        add_to(b, dw, at, b.add(b.load(x, at), b.cast(b.program_id(0), "f32")))
        return []

    b.loop((b.const(0), b.const(STEPS), b.const(1)), [], body)


def state_kernel(build: object = states) -> Kernel:
    return made("X:*f32 W:*f32 dW:*f32 channels", build, LANES=LANES)  # type: ignore[arg-type]


def states_of(programs: int, elements: int = STEPS * LANES) -> Calls:
    return Calls(({"grid0": programs, "W": torch.zeros(elements), "channels": 1, "LANES": LANES},))


@pytest.mark.parametrize(("programs", "is_stored"), [(3, True), (300, False)])
def test_large_rows_are_for_few_programs(programs: int, is_stored: bool) -> None:
    # A row takes the memory of the gradient: three hundred of them would take three hundred times that.
    found = slotted(state_kernel(), {"W": "dW"}, Launch.like_forward(1, states_of(programs)))
    assert (writes(found.kernel) == [Code.STORE]) is is_stored
    assert all(one.total.wide for one in found.slots)


def test_large_rows_are_not_had_where_no_call_shows_how_many_they_are() -> None:
    assert not slotted(state_kernel(), {"W": "dW"}, Launch.like_forward(1)).slots


def test_large_rows_are_not_had_where_programs_read_the_same() -> None:
    # Three programs of a small call are thousands at real sizes, and their rows thousands of times what is read.
    assert not slotted(state_kernel(shared_states), {"W": "dW"}, Launch.like_forward(1, states_of(3))).slots


def test_large_rows_that_programs_leave_parts_of_are_not_had() -> None:
    # What programs load bounds what they store, but rows have all elements, and zeros beside a program's window.
    calls = states_of(3, elements=100 * STEPS * LANES)
    assert not slotted(state_kernel(), {"W": "dW"}, Launch.like_forward(1, calls)).slots


def test_large_rows_for_each_of_a_few_places_are_had_whatever_programs_read() -> None:
    # Their number is in the text: twice the gradient's memory at any size.
    def build(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
        lanes = b.arange(0, WIDE, "WIDE")
        value = b.load(x, lanes)
        add_to(b, dw, b.add(b.mul(b.program_id(0), b.const(WIDE, "i32", "WIDE")), lanes), value)
        add_to(b, dw, b.add(b.mul(lanes, channels), b.program_id(0)), value)

    calls = Calls(({"grid0": 3, "W": torch.zeros(3 * WIDE), "channels": 3, "WIDE": WIDE},))
    found = slotted(kernel(build), {"W": "dW"}, Launch.like_forward(1, calls))
    assert [one.buffer.shape[0] for one in found.slots] == ["2"]


def test_rows_of_additions_in_a_loop_add_up_to_the_gradient() -> None:
    found = slotted(state_kernel(), {"W": "dW"}, Launch.like_forward(1, states_of(3)))
    (one,) = found.slots
    x, rows = torch.randn(3, STEPS * LANES, dtype=torch.float64), torch.full((3, STEPS * LANES), torch.nan).double()
    given = {"X": x, one.buffer.name: rows, "channels": 1, one.width: STEPS * LANES, "W": rows[0]}
    evaluate(found.kernel, (3,), {value.name: given[value.name] for value in found.kernel.arguments})
    torch.testing.assert_close(rows.sum(0), x.sum(0))


def test_additions_at_places_that_may_meet_have_rows_of_their_own() -> None:
    # Each place is stored to once; one row for both would lose what the first stored where the second does.
    def build(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
        lanes = b.arange(0, WIDE, "WIDE")
        at = b.add(b.mul(b.program_id(0), b.const(WIDE, "i32", "WIDE")), lanes)
        value = b.load(x, at)
        add_to(b, dw, at, value)
        add_to(b, dw, b.add(b.mul(lanes, channels), b.program_id(0)), value)

    count = 3
    calls = Calls(({"grid0": count, "W": torch.zeros(count * WIDE), "channels": count},))
    found = slotted(kernel(build), {"W": "dW"}, Launch.like_forward(1, calls))
    assert writes(found.kernel) == [Code.STORE, Code.STORE]
    (one,) = found.slots
    x = torch.randn(count * WIDE, dtype=torch.float64)
    rows = torch.zeros(2, count * WIDE, dtype=torch.float64)
    given = {"X": x, one.buffer.name: rows, "channels": count, one.width: count * WIDE, "W": rows[0]}
    evaluate(found.kernel, (count,), {value.name: given[value.name] for value in found.kernel.arguments})
    torch.testing.assert_close(rows.sum(0), x + x.reshape(count, WIDE).T.flatten())


def sums_of_tiles(b: Builder, x: Value, w: Value, dw: Value, channels: Value) -> None:
    """Tile (i, j) adds its rows' sums to the elements i of dW, and its columns' to the elements j behind those."""
    i, j = b.program_id(0), b.program_id(1)
    tile = b.add(b.mul(i, b.num_programs(1)), j)
    value = b.sum(b.load(x, b.add(b.mul(tile, b.const(WIDE, "i32", "WIDE")), b.arange(0, WIDE, "WIDE"))), 0)
    add_to(b, dw, i, value)
    add_to(b, dw, b.add(channels, j), b.mul(value, b.const(10.0, "f32")))


def test_sums_by_rows_and_by_columns_have_as_many_rows_as_programs_share_an_element() -> None:
    # A row of its own for each of the 3 * 5 programs at each place would hold one number in eight.
    found = slotted(kernel(sums_of_tiles), {"W": "dW"}, Launch.like_forward(2))
    assert writes(found.kernel) == [Code.STORE, Code.STORE]
    (one,) = found.slots
    assert one.buffer.shape[0] == "grid0 + grid1"
    x = torch.randn(3, 5, WIDE, dtype=torch.float64)
    rows = torch.zeros(3 + 5, 8, dtype=torch.float64)
    given = {"X": x, one.buffer.name: rows, "channels": 3, one.width: 8, "W": rows[0]}
    evaluate(found.kernel, (3, 5), {value.name: given[value.name] for value in found.kernel.arguments})
    torch.testing.assert_close(rows.sum(0), torch.cat((x.sum((1, 2)), 10 * x.sum((0, 2)))))
    assert int((rows != 0).sum()) == 2 * 3 * 5
