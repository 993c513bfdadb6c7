"""Rows that a program goes through one by one take the single element that each of them has, too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from schedule_kernels import add_to, made

from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.gather import gathered
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK, ROWS, LENGTH = 8, 3, 13
LAUNCH = Launch.like_forward(1)


def additions(kernel: Kernel) -> int:
    return sum(op.code is Code.ATOMIC_ADD for op in kernel.ops)


def tokens(order: str, *, sums: bool = False) -> Kernel:
    """One program adds 5 to the element of each row that LABELS names, and 1 to all of the row in blocks, row by row.

    `sums`: to the element, how often it is added to the row instead.
    """

    def build(b: Builder, labels: Value, dx: Value, n: Value, rows: Value) -> None:
        def row(index: Value, _: Sequence[Value]) -> Sequence[Value]:
            start, label = b.mul(index, n), b.load(labels, index)

            def whole() -> Value:
                def body(off: Value, counts: Sequence[Value]) -> Sequence[Value]:
                    cols = b.add(off, b.arange(0, BLOCK, "BLOCK"))
                    add_to(b, dx, b.add(start, cols), b.const(1.0, "f32"), b.compare("lt", cols, n))
                    return [b.add(counts[0], b.const(1.0, "f32"))]

                return b.loop((b.const(0), n, b.const(BLOCK, "i32", "BLOCK")), [b.const(0.0, "f32")], body)[0]

            count = whole() if order == "row first" else b.const(5.0, "f32")
            add_to(b, dx, b.add(start, label), count if sums else b.const(5.0, "f32"))
            if order == "element first":
                whole()
            return []

        b.loop((b.const(0), rows, b.const(1)), [], row)

    return made("LABELS:*i32 dX:*f32 N rows", build, BLOCK=BLOCK)


def of_tokens(kernel: Kernel) -> torch.Tensor:
    dx = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    labels = torch.tensor([0, 12, 7], dtype=torch.int32)
    evaluate(kernel, (1,), {"LABELS": labels, "dX": dx, "N": LENGTH, "rows": ROWS})
    return dx


@pytest.mark.parametrize("order", ["element first", "row first"])
def test_the_lane_of_the_element_adds_both_in_each_row_that_a_program_goes_through(order: str) -> None:
    # The tokens of a sequence are a loop of its program: all logits of their rows were added to atomically.
    plain = tokens(order)
    found = gathered(plain, LAUNCH).kernel
    assert additions(found) == 1
    torch.testing.assert_close(of_tokens(found), of_tokens(plain))
    assert of_tokens(found).sum() == ROWS * (LENGTH + 5)


def test_what_the_loop_over_a_row_counts_is_not_added_before_that_is_known() -> None:
    plain = tokens("row first", sums=True)
    torch.testing.assert_close(of_tokens(gathered(plain, LAUNCH).kernel), of_tokens(plain))
