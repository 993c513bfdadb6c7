"""An addition to one element of a row becomes part of the addition to the row, so that both can be one store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from schedule_kernels import add_to, made

from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.gather import Gathered, gathered
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK, ROWS, LENGTH = 8, 3, 13


def element_and_row(order: str, *, branch: bool = False, stop: str = "N", inside: bool = False) -> Kernel:
    """Each program adds 5 to the element of its row that LABELS names, and 1 to all of the row in blocks."""

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

        if order == "element first":
            single()
        b.loop((b.const(0), n if stop == "N" else fewer, b.const(BLOCK, "i32", "BLOCK")), [], body)
        if order == "row first":
            single()

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
