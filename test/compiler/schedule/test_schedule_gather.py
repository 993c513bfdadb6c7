"""An addition to one element of a row becomes part of the addition to the row, so that both can be one store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from schedule_kernels import add_to, made
from schedule_plans import forward, run

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.gather import MOST, Gathered, gathered
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

BLOCK, ROWS, LENGTH = 8, 3, 13
PART, HALF = 8, 4


def element_and_row(
    order: str, *, branch: bool = False, stop: str = "N", inside: bool = False, kept: str = "all"
) -> Kernel:
    """Each program adds 5 to the element of its row that LABELS names, and 1 to all of the row in blocks.

    Only if a row's label is not `none`: the addition to the element, if `branch`; both, where `kept` is "rows"; each
    behind a condition of its own, where it is "each".
    """

    def build(b: Builder, x: Value, labels: Value, dx: Value, n: Value, fewer: Value, none: Value) -> None:
        row = b.program_id(0, "row")
        start = b.mul(row, n)
        label = b.load(labels, row)

        def element() -> list[Value]:
            place = b.load(labels, row) if inside else label
            five = b.load(x, row) if branch else b.const(5.0, "f32")
            add_to(b, dx, b.add(start, place), five)
            return []

        def single() -> None:
            if branch:
                b.branch(b.compare("eq", label, none), list, element)
            else:
                element()

        def body(off: Value, _: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, b.arange(0, BLOCK, "BLOCK"))
            add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.compare("lt", cols, n))
            return []

        def whole() -> None:
            b.loop((b.const(0), n if stop == "N" else fewer, b.const(BLOCK, "i32", "BLOCK")), [], body)

        def done(parts: Sequence[Callable[[], None]]) -> list[Value]:
            for part in parts:
                part()
            return []

        parts = [single, whole] if order == "element first" else [whole, single]
        if kept == "all":
            done(parts)
            return
        ignored = b.compare("eq", label, none)
        for group in [parts] if kept == "rows" else [[part] for part in parts]:
            b.branch(ignored, list, functools.partial(done, group))

    return made("X:*f32 LABELS:*i32 dX:*f32 N fewer none", build, BLOCK=BLOCK)


def gather(kernel: Kernel) -> Gathered:
    return gathered(kernel, Launch.like_forward(1))


def additions(kernel: Kernel) -> int:
    return sum(op.code is Code.ATOMIC_ADD for op in kernel.ops)


def gradient(kernel: Kernel, labels: Sequence[int], none: int = -100) -> torch.Tensor:
    dx = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    x = torch.full((ROWS,), 5.0, dtype=torch.float64)
    given = {"X": x, "LABELS": torch.tensor(labels, dtype=torch.int32), "dX": dx, "N": LENGTH, "fewer": 9, "none": none}
    evaluate(kernel, (ROWS,), {value.name: given[value.name] for value in kernel.arguments})
    return dx


@pytest.mark.parametrize("order", ["element first", "row first"])
def test_the_lane_of_the_element_adds_both(order: str) -> None:
    plain = element_and_row(order)
    found = gather(plain).kernel
    assert additions(plain) == 2
    assert additions(found) == 1
    labels = [0, 12, 7]
    torch.testing.assert_close(gradient(found, labels), gradient(plain, labels))


@pytest.mark.parametrize("inside", [False, True])
def test_an_element_that_a_branch_adds_to_is_left_alone_where_the_branch_does_not_run(inside: bool) -> None:
    # Of the ignored row nothing but the ones may be left, though its label names no element.
    plain = element_and_row("element first", branch=True, inside=inside)
    found = gather(plain).kernel
    assert additions(found) == 1
    labels = [4, -100, 12]
    torch.testing.assert_close(gradient(found, labels), gradient(plain, labels))
    assert gradient(found, labels)[1].tolist() == [1.0] * LENGTH


@pytest.mark.parametrize("branch", [False, True])
def test_the_lane_of_the_element_adds_both_in_rows_that_a_label_does_not_leave_out(branch: bool) -> None:
    # A cross entropy returns early from rows to be ignored: theirs must stay untouched, though their label names none.
    plain = element_and_row("element first", kept="rows", branch=branch)
    found = gather(plain).kernel
    assert additions(found) == 1
    labels = [4, -100, 12]
    torch.testing.assert_close(gradient(found, labels), gradient(plain, labels))
    assert gradient(found, labels)[1].tolist() == [0.0] * LENGTH


def test_an_element_and_a_row_behind_conditions_of_their_own_stay_two() -> None:
    # What the one side computes is not there on the other, even where both are taken alike.
    assert additions(gather(element_and_row("element first", kept="each")).kernel) == 2


@pytest.mark.parametrize("label", [-1, LENGTH])
def test_an_element_outside_of_its_row_makes_the_row_nan(label: int) -> None:
    # No lane of the row has it: left out, it would be missing from another row's gradient without a word.
    found = gather(element_and_row("element first")).kernel
    dx = gradient(found, [2, label, 3])
    assert dx[1].isnan().all()
    assert not dx[[0, 2]].isnan().any()


def test_a_row_may_be_bounded_by_what_is_left_of_it() -> None:
    # The mask `cols < N - off` names N by a difference only; the row's length is N all the same.
    def build(b: Builder, x: Value, labels: Value, dx: Value, n: Value, fewer: Value, none: Value) -> None:
        row, lanes = b.program_id(0, "row"), b.arange(0, BLOCK, "BLOCK")
        start = b.mul(row, n)
        add_to(b, dx, b.add(start, b.load(labels, row)), b.const(5.0, "f32"))

        def body(off: Value, _: Sequence[Value]) -> Sequence[Value]:
            left = b.compare("lt", lanes, b.sub(n, off))
            add_to(b, dx, b.add(b.add(start, off), lanes), b.const(1.0, "f32"), left)
            return []

        b.loop((b.const(0), n, b.const(BLOCK, "i32", "BLOCK")), [], body)

    plain = made("X:*f32 LABELS:*i32 dX:*f32 N fewer none", build, BLOCK=BLOCK)
    found = gather(plain).kernel
    assert additions(found) == 1
    labels = [0, 12, 7]
    torch.testing.assert_close(gradient(found, labels), gradient(plain, labels))


def test_a_masked_element_may_lie_outside_of_its_row() -> None:
    # Labels of words that another program has are masked; NaN for these would spoil rows that are right.
    def build(b: Builder, x: Value, labels: Value, dx: Value, n: Value, fewer: Value, none: Value) -> None:
        row, lanes = b.program_id(0, "row"), b.arange(0, 2 * BLOCK, "WIDE")
        start, label = b.mul(row, n), b.load(labels, row)
        own = b.logical_and(b.compare("ge", label, b.const(0)), b.compare("lt", label, fewer))
        add_to(b, dx, b.add(start, label), b.const(5.0, "f32"), own)
        add_to(b, dx, b.add(start, lanes), b.const(1.0, "f32"), b.compare("lt", lanes, n))

    plain = made("X:*f32 LABELS:*i32 dX:*f32 N fewer none", build, WIDE=2 * BLOCK)
    found = gather(plain).kernel
    assert additions(found) == 1
    labels = [-1, 10, 7]
    torch.testing.assert_close(gradient(found, labels), gradient(plain, labels))


def test_a_branch_behind_the_row_is_left_as_it_is() -> None:
    assert additions(gather(element_and_row("row first", branch=True)).kernel) == 2


def test_rows_whose_loop_may_end_early_are_a_claim() -> None:
    found = gather(element_and_row("element first", stop="fewer"))
    assert [claim.text() for claim in found.claims] == ["BLOCK * triton.cdiv(fewer, BLOCK) >= N"]


def test_two_additions_to_rows_are_not_one_of_them() -> None:
    # Which of the two would have to add the element is not said.
    def build(b: Builder, dx: Value, n: Value) -> None:
        start, cols = b.mul(b.program_id(0), n), b.arange(0, BLOCK, "BLOCK")
        for _ in range(2):
            add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.compare("lt", cols, n))
        add_to(b, dx, start, b.const(1.0, "f32"))

    assert additions(gather(made("dX:*f32 N", build, BLOCK=BLOCK)).kernel) == 3


def elements_and_row(few: int, *, named: bool = True) -> Kernel:
    """Each program adds 5 and up to all of `few` elements of its row, which LABELS or their numbers name, and 1 to all
    of the row in blocks."""

    def build(b: Builder, x: Value, labels: Value, dx: Value, n: Value) -> None:
        row, lanes = b.program_id(0, "row"), b.arange(0, few, "FEW")
        start = b.mul(row, n)
        place = b.load(labels, b.add(b.mul(row, b.const(few)), lanes)) if named else b.mul(lanes, b.const(2))
        value = b.add(b.cast(lanes, "f32"), b.const(5.0, "f32"))
        add_to(b, dx, b.add(start, place), value, b.compare("lt", lanes, b.const(3)))

        def body(off: Value, _: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, b.arange(0, BLOCK, "BLOCK"))
            add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.compare("lt", cols, n))
            return []

        b.loop((b.const(0), n, b.const(BLOCK, "i32", "BLOCK")), [], body)

    return made("X:*f32 LABELS:*i32 dX:*f32 N", build, BLOCK=BLOCK, FEW=few)


def test_elements_that_a_tile_names_are_all_added_those_named_twice_twice() -> None:
    # Where the first that fits were taken, a repeated candidate would be added once; the fourth is masked.
    plain = elements_and_row(4)
    found = gather(plain).kernel
    assert additions(found) == 1
    labels = [0, 12, 12, -7, 3, 4, 5, 99, 7, 7, 7, 7]
    torch.testing.assert_close(gradient(found, labels), gradient(plain, labels))


def test_one_of_several_elements_outside_of_its_row_makes_the_row_nan() -> None:
    dx = gradient(gather(elements_and_row(4)).kernel, [0, 1, 2, 0, 0, LENGTH, 2, 0, 0, 1, 2, 0])
    assert dx[1].isnan().all()
    assert not dx[[0, 2]].isnan().any()


def test_many_elements_are_not_compared_with_every_lane() -> None:
    assert additions(gather(elements_and_row(2 * MOST)).kernel) == 2


def test_a_tile_of_places_that_no_memory_names_is_a_row_itself() -> None:
    assert additions(gather(elements_and_row(4, named=False)).kernel) == 2


def test_the_first_element_needs_no_label() -> None:
    def build(b: Builder, dx: Value, n: Value) -> None:
        start, cols = b.mul(b.program_id(0), n), b.arange(0, 2 * BLOCK, "WIDE")
        add_to(b, dx, start, b.const(5.0, "f32"))
        add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.compare("lt", cols, n))

    plain = made("dX:*f32 N", build, WIDE=2 * BLOCK)
    found = gather(plain).kernel
    assert additions(found) == 1
    torch.testing.assert_close(gradient(found, []), gradient(plain, []))


def test_a_program_that_may_end_between_element_and_row_adds_to_each_as_before() -> None:
    # One addition would be made for both, or for none, of a program that makes the first alone.
    def build(b: Builder, labels: Value, dx: Value, n: Value) -> None:
        row, cols = b.program_id(0), b.arange(0, 2 * BLOCK, "WIDE")
        start = b.mul(row, n)
        add_to(b, dx, b.add(start, b.load(labels, row)), b.const(5.0, "f32"))
        b.add_op(Op(Code.LEAVE_IF, (b.compare("ge", row, b.const(2)),), ()))
        add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.compare("lt", cols, n))

    assert additions(gather(made("LABELS:*i32 dX:*f32 N", build, WIDE=2 * BLOCK)).kernel) == 2


def chunks(*, guard: str) -> Kernel:
    """Program (row, chunk) adds 1 to its part of a row, and 5 to the element that LABELS names where `guard` says."""

    def build(b: Builder, labels: Value, dx: Value, n: Value) -> None:
        row, chunk = b.program_id(0, "row"), b.program_id(1, "chunk")
        start, first = b.mul(row, n), b.mul(chunk, b.const(PART, "i32", "PART"))
        end = b.elementwise(Code.MIN, (b.add(first, b.const(PART, "i32", "PART")), n))
        label = b.load(labels, row)
        inside = b.compare("lt", label, end)
        if guard == "both":
            inside = b.logical_and(b.compare("ge", label, first), inside)

        def element() -> list[Value]:
            add_to(b, dx, b.add(start, label), b.const(5.0, "f32"))
            return []

        b.branch(inside, element, list)

        def body(off: Value, _: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, b.arange(0, HALF, "HALF"))
            add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.compare("lt", cols, end))
            return []

        b.loop((first, end, b.const(HALF, "i32", "HALF")), [], body)

    return made("LABELS:*i32 dX:*f32 N", build, HALF=HALF, PART=PART)


def test_the_program_of_a_part_of_a_row_adds_the_element_that_lies_in_it() -> None:
    plain = chunks(guard="both")
    found = gathered(plain, Launch.like_forward(2)).kernel
    assert additions(found) == 1
    results = []
    for kernel in (plain, found):
        dx = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
        labels = torch.tensor([0, 12, 8], dtype=torch.int32)
        evaluate(kernel, (ROWS, -(-LENGTH // PART)), {"LABELS": labels, "dX": dx, "N": LENGTH})
        results.append(dx)
    torch.testing.assert_close(results[1], results[0])
    assert results[1].sum() == ROWS * (LENGTH + 5)


def test_a_part_of_a_row_does_not_take_an_element_that_may_lie_in_another() -> None:
    # Programs of later parts would miss it, and no other lane has it.
    assert additions(gathered(chunks(guard="end"), Launch.like_forward(2)).kernel) == 2


def picks(row: str, trips: int = 2) -> Kernel:
    """Each program loads its row, and a few elements of it that LABELS names. `row`: what of it the tile has."""

    def build(b: Builder, x: Value, y: Value, labels: Value, n: Value, fewer: Value) -> None:
        start = b.mul(b.program_id(0, "row"), n)
        lanes = b.arange(0, 2 * BLOCK, "BLOCK")
        end = n if row == "whole" else fewer
        tile = b.load(x, b.add(start, lanes), b.compare("lt", lanes, end), b.const(0.0, "f32"))
        # A row of zeros or less has no such place: what is loaded is not used but for that.
        some = b.compare("ge", b.reduce(Code.REDUCE_MAX, tile, 0), b.const(-100.0, "f32"))

        def body(trip: Value, _: Sequence[Value]) -> Sequence[Value]:
            place = b.load(labels, b.add(b.mul(b.program_id(0), b.const(trips)), trip))
            found = b.load(x, b.add(start, place), some, b.const(0.0, "f32"))
            b.store(y, b.add(b.mul(b.program_id(0), b.const(trips)), trip), found)
            return []

        b.loop((b.const(0), b.const(trips), b.const(1)), [], body)

    return forward("X:*f32 Y:*f32 LABELS:*i32 N fewer", build, BLOCK=2 * BLOCK)


def plan_of(kernel: Kernel, fewer: int = LENGTH) -> BackwardPlan:
    calls = Calls(({"X": torch.empty(ROWS, LENGTH), "N": LENGTH, "fewer": fewer, "grid0": ROWS, "BLOCK": 2 * BLOCK},))
    adjoint = differentiate(kernel, read=frozenset("X"), written=frozenset("Y"))
    return plans(kernel, adjoint, 1, calls=calls)[0]


def test_elements_that_a_program_picks_from_its_row_are_stored_with_the_row() -> None:
    # Added on their own they need a row of zeros from somebody else, in float32, and a conversion of all of it.
    plan = plan_of(picks("whole"))
    (step,), (buffer,) = plan.steps, plan.buffers
    assert additions(step.kernel) == 0
    assert "X.numel() == " in buffer.empty_if
    given = {"X": torch.randn(ROWS, LENGTH, dtype=torch.float64), "N": LENGTH, "fewer": 9}
    given |= {"LABELS": torch.tensor([3, 3, 0, 12, 5, 1], dtype=torch.int32)}
    cotangents = {"Y": torch.arange(1.0, 7.0, dtype=torch.float64)}
    found, _ = run(plan, given, cotangents, (ROWS,), BLOCK=2 * BLOCK)
    expected = torch.zeros(ROWS * LENGTH, dtype=torch.float64)
    expected.index_add_(0, torch.tensor([3, 3, 13, 25, 31, 27]), cotangents["Y"])
    assert torch.equal(found["X"].flatten(), expected)


def test_elements_of_a_row_that_a_program_has_a_part_of_stay_single() -> None:
    # The rest of the row would keep what memory held; and many elements one after the other take longer than a sum.
    assert additions(plan_of(picks("part"), fewer=9).steps[0].kernel) == 1
    assert additions(plan_of(picks("whole", trips=MOST + 1)).steps[0].kernel) == 1
