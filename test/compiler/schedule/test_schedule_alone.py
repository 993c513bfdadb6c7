"""What one program adds to its own elements again and again is summed in memory, without atomics."""

from __future__ import annotations

import pytest
import torch
from schedule_kernels import add_to, made

from kernel_agent.compiler.schedule.alone import summed_in_memory
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import Ownership, owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK, WIDTH = 4, 8


def rows_twice(stride: int = WIDTH, other_row: int = 0, repeated: int = 1) -> Kernel:
    """Each program adds to the tiles of its row in a loop, and then to its first element, or that of `other_row`."""

    def build(b: Builder, x: Value, dx: Value) -> None:
        row = b.mul(b.program_id(0), b.const(stride))

        def body(start: Value, _: list[Value]) -> list[Value]:
            at = b.add(b.add(row, start), b.arange(0, BLOCK, "BLOCK"))
            add_to(b, dx, at, b.load(x, at))
            return []

        for _ in range(repeated):
            b.loop((b.const(0), b.const(WIDTH), b.const(BLOCK, "i32", "BLOCK")), [], body)
        add_to(b, dx, b.add(row, b.const(other_row * stride)), b.const(1.0, "f32"))

    return made("X:*f32 dX:*f32", build, BLOCK=BLOCK)


def own(kernel: Kernel) -> Ownership:
    return owned(kernel, {"X": "dX"}, Launch.like_forward(1))


@pytest.mark.parametrize("repeated", [1, 2])
def test_a_row_that_several_loops_add_to_belongs_to_its_program(repeated: int) -> None:
    assert own(rows_twice(repeated=repeated)).alone == {"dX"}


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(rows_twice(stride=WIDTH // 2), id="rows overlap"),
        pytest.param(rows_twice(other_row=1), id="the element is the next program's"),
    ],
)
def test_elements_that_another_program_may_have_stay_atomic(kernel: Kernel) -> None:
    # A proof of each place by itself would accept both.
    assert own(kernel).alone == frozenset()


def test_lanes_that_add_to_one_element_stay_atomic() -> None:
    # They would all load the same, and the last one stored would be the sum.
    def build(b: Builder, x: Value, dx: Value) -> None:
        at = b.add(b.program_id(0), b.mul(b.arange(0, BLOCK, "BLOCK"), b.const(0)))
        for _ in range(2):
            add_to(b, dx, b.whole(at, (BLOCK,)), b.load(x, b.arange(0, BLOCK, "BLOCK")))

    assert own(made("X:*f32 dX:*f32", build, BLOCK=BLOCK)).alone == frozenset()


def test_lanes_whose_remainders_are_the_same_stay_atomic() -> None:
    # `lane % 2` depends on the lane and does not tell it: four lanes added to two elements, and two sums were lost.
    def build(b: Builder, x: Value, dx: Value) -> None:
        lanes, two = b.arange(0, BLOCK, "BLOCK"), b.const(2)
        at = b.add(b.mul(b.program_id(0), two), b.elementwise(Code.REM, (lanes, two)))
        add_to(b, dx, at, b.load(x, b.add(b.mul(b.program_id(0), b.const(BLOCK)), lanes)))

    assert own(made("X:*f32 dX:*f32", build, BLOCK=BLOCK)).alone == frozenset()


def test_sums_in_memory_are_the_sums_of_the_additions() -> None:
    # A load that left the loop, or was shared by two additions, would lose what came between.
    kernel = summed_in_memory(rows_twice(repeated=2), {"dX"})
    codes = [op.code for op in kernel.ops]
    assert Code.ATOMIC_ADD not in codes
    assert codes.count(Code.BARRIER) == 3
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    dx = torch.zeros_like(x)
    evaluate(kernel, (3,), {"X": x, "dX": dx})
    wanted = 2 * x
    wanted[:, 0] += 1
    torch.testing.assert_close(dx, wanted)
