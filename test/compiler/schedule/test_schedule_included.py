"""A row that leaves out the element of a single addition adds zero to it instead, so that both can be one store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from schedule_kernels import add_to, made

from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.gather import gathered
from kernel_agent.compiler.schedule.included import included
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK, ROWS, LENGTH = 8, 3, 13
LAUNCH = Launch.like_forward(1)


def margin(left_out: str) -> Kernel:
    """Each program adds 5 to the element of its row that LABELS names, and 1 to all of the row but one, in blocks."""

    def build(b: Builder, labels: Value, others: Value, dx: Value, n: Value) -> None:
        row = b.program_id(0, "row")
        start, label, other = b.mul(row, n), b.load(labels, row), b.load(others, row)

        def body(off: Value, _: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, b.arange(0, BLOCK, "BLOCK"))
            seen = b.compare("ne", cols, b.whole({"label": label, "other": other}[left_out], (BLOCK,)))
            add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.logical_and(b.compare("lt", cols, n), seen))
            return []

        b.loop((b.const(0), n, b.const(BLOCK, "i32", "BLOCK")), [], body)
        add_to(b, dx, b.add(start, label), b.const(5.0, "f32"))

    return made("LABELS:*i32 OTHERS:*i32 dX:*f32 N", build, BLOCK=BLOCK)


def gradient(kernel: Kernel) -> torch.Tensor:
    dx = torch.zeros(ROWS * LENGTH, dtype=torch.float64)
    labels, others = torch.tensor([0, 12, 5]), torch.tensor([3, 12, 6])
    evaluate(kernel, (ROWS,), {"LABELS": labels, "OTHERS": others, "dX": dx, "N": LENGTH})
    return dx


def additions(kernel: Kernel) -> int:
    return sum(op.code is Code.ATOMIC_ADD for op in kernel.ops)


def test_an_element_that_a_row_leaves_out_is_added_by_its_lane() -> None:
    # With the label out of the mask, no lane of the row had its element, and all logits of an ArcFace loss were added
    # to atomically.
    kernel = margin("label")
    found = gathered(included(kernel, LAUNCH), LAUNCH).kernel
    assert additions(found) == 1
    torch.testing.assert_close(gradient(found), gradient(kernel))


@pytest.mark.parametrize("left_out", ["label", "other"])
def test_rows_get_the_same_from_masks_that_leave_nothing_out(left_out: str) -> None:
    # What a row leaves out for another reason is not what the single addition is to, and stays left out.
    kernel = margin(left_out)
    found = included(kernel, LAUNCH)
    assert (found is kernel) == (left_out == "other")
    torch.testing.assert_close(gradient(found), gradient(kernel))
