"""What both sides of a branch add to one place is added behind it, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from schedule_kernels import add_to, made

from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.either import behind_branches
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

COLS = 8
SLOTS, ROWS, N = 3, 2, 5
ARGUMENTS = "X:*f32 Y:*f32 dX:*f32 n"
Side = Callable[[Builder, Value, Value, Value], None]
"""Adds to dX at an offset under a mask."""


def number(value: float) -> Side:
    def build(b: Builder, dx: Value, at: Value, mask: Value) -> None:
        add_to(b, dx, at, b.const(value, "f32"), mask)

    return build


def nothing(b: Builder, dx: Value, at: Value, mask: Value) -> None:
    """A side that adds nothing."""


def one_further(b: Builder, dx: Value, at: Value, mask: Value) -> None:
    add_to(b, dx, b.add(at, b.const(1)), b.const(2.0, "f32"), mask)


def without_mask(b: Builder, dx: Value, at: Value, mask: Value) -> None:
    add_to(b, dx, at, b.const(2.0, "f32"))


def after_some_left(b: Builder, dx: Value, at: Value, mask: Value) -> None:
    """Programs of rows from 1 on are gone then: nothing is added behind the branch by these."""
    b.add_op(Op(Code.LEAVE_IF, (b.compare("ge", b.program_id(0), b.const(1)),), ()))
    add_to(b, dx, at, b.const(2.0, "f32"), mask)


def after_a_read(b: Builder, dx: Value, at: Value, mask: Value) -> None:
    """What it adds is what the memory held."""
    add_to(b, dx, at, b.load(dx, at, mask, b.const(0.0, "f32")), mask)


def slots(then: Side, other: Side) -> Kernel:
    """Rows of `n` columns for each row and slot; the first slot adds what `then` says, the others what `other` does."""

    def build(b: Builder, x: Value, y: Value, dx: Value, n: Value) -> None:
        row, slot = b.program_id(0), b.program_id(1)
        cols = b.arange(0, COLS, "COLS")
        at = b.add(b.mul(b.add(b.mul(row, b.const(SLOTS)), slot), n), cols)
        mask = b.compare("lt", cols, n)

        def side(build: Side) -> Callable[[], list[Value]]:
            def made() -> list[Value]:
                build(b, dx, at, mask)
                return []

            return made

        b.branch(b.compare("eq", slot, b.const(0)), side(then), side(other))

    return made(ARGUMENTS, build, COLS=COLS)


def among_others(b: Builder, dx: Value, at: Value, mask: Value) -> None:
    """Another branch within the side, both sides of which add."""

    def side(value: float) -> Callable[[], list[Value]]:
        def made() -> list[Value]:
            number(value)(b, dx, at, mask)
            return []

        return made

    b.branch(b.compare("eq", b.program_id(1), b.const(1)), side(2.0), side(3.0))


def additions(kernel: Kernel) -> list[Op]:
    return [op for op in kernel.ops if op.code is Code.ATOMIC_ADD]


def after(kernel: Kernel) -> torch.Tensor:
    memory = torch.zeros(ROWS * SLOTS * N)
    evaluate(kernel, (ROWS, SLOTS), {"X": memory.clone(), "Y": memory.clone(), "dX": memory, "n": N})
    return memory


@pytest.mark.parametrize("other", [number(2.0), among_others])
def test_sides_that_add_to_one_place_leave_that_to_one_addition_behind_the_branch(other: Side) -> None:
    # Taken from one side only, or as a sum of both, slots would hold zeros or each other's numbers.
    kernel = slots(number(1.0), other)
    found = behind_branches(kernel)
    (added,) = additions(found)
    assert added in found.body.ops
    assert torch.equal(after(found), after(kernel))
    assert sorted(set(after(found).tolist())) == ([1.0, 2.0] if other is not among_others else [1.0, 2.0, 3.0])


@pytest.mark.parametrize("other", [nothing, one_further, without_mask, after_some_left, after_a_read])
def test_sides_that_do_not_add_alike_keep_what_they_add(other: Side) -> None:
    # Behind the branch one mask and one address would be both sides', and programs that left would add nothing.
    kernel = slots(number(1.0), other)
    assert behind_branches(kernel) is kernel


def test_a_buffer_that_is_stored_to_later_is_added_to_where_it_was() -> None:
    # An addition that comes behind a store would not be overwritten by it.
    def build(b: Builder, x: Value, y: Value, dx: Value, n: Value) -> None:
        def side(value: float) -> Callable[[], list[Value]]:
            def made() -> list[Value]:
                add_to(b, dx, b.const(0), b.const(value, "f32"))
                b.store(dx, b.const(0), b.const(5.0, "f32"))
                return []

            return made

        b.branch(b.compare("eq", b.program_id(1), b.const(0)), side(1.0), side(2.0))

    kernel = made(ARGUMENTS, build)
    assert behind_branches(kernel) is kernel


def test_slots_of_one_gradient_are_stored_and_cover_it() -> None:
    # With a condition left around the store, what the other slots have would be NaN where memory starts empty.
    kernel = slots(number(1.0), among_others)
    names = {"X": torch.zeros(ROWS, SLOTS, N), "n": N, "grid0": ROWS, "grid1": SLOTS, "COLS": COLS}
    plan = plans(kernel, Adjoint(kernel, {}, {"X": "dX"}, ()), 2, calls=Calls((names,)))[0]
    (step,) = plan.steps
    assert {op.code for op in step.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)} == {Code.STORE}
    got = torch.full((ROWS * SLOTS * N,), torch.nan)
    evaluate(step.kernel, (ROWS, SLOTS), {"X": names["X"], "dX": got, "n": N})
    assert torch.equal(got, after(kernel))
