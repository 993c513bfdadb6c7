"""Sums over a row that need not wait for each other do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.reload import reloaded
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import REDUCTIONS, Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value
from kernel_agent.compiler.ssa.verify import verify

Second = Callable[[Builder, Value, Value], Value]
"""Of the tile and the first sum of its rows, expanded: the tile whose sum is the second one."""


def by_rows(second: Second, *, rows: int = 1) -> Kernel:
    """dX = x * (the sum of what `second` makes of x and the sum of x), by `rows` rows of 8 lanes at once."""

    def build(b: Builder, x: Value, dx: Value, trips: Value) -> None:
        cols = b.arange(0, 8, "BLOCK", name="cols")

        def body(row: Value, _: list[Value]) -> list[Value]:
            if rows > 1:
                lines = b.add(b.mul(row, b.const(rows)), b.arange(0, rows, "ROWS"))
                at = b.add(b.mul(b.expand(lines, 1), b.const(8)), b.expand(cols, 0))
            else:
                at = b.add(b.mul(row, b.const(8)), cols)
            axis = 1 if rows > 1 else 0
            tile = b.load(x, at)
            first = b.sum(tile, axis)
            total = b.sum(second(b, tile, b.expand(first, 1) if rows > 1 else first), axis)
            b.store(dx, at, b.mul(tile, b.expand(total, 1) if rows > 1 else total))
            return []

        b.loop((b.const(0), trips, b.const(1)), [], body, index_name="row", certain=True, num_stages="STAGES")

    return made("X:*f32 dX:*f32 trips", build, BLOCK=8, STAGES=1, **({"ROWS": rows} if rows > 1 else {}))


def gradient(kernel: Kernel) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    dx = torch.full_like(x, torch.nan)
    trips = 6 // kernel.constants.get("ROWS", 1)
    evaluate(kernel, (1,), {"X": x, "dX": dx, "trips": trips}, open_lanes=float("nan"))
    return dx


def again(kernel: Kernel) -> Kernel:
    """With rows loaded again, which the constexpr asks for here."""
    found = reloaded(kernel, "STAGES", "RELOAD")
    assert found is not None
    verify(found)
    return found


def waiting(kernel: Kernel) -> list[Op]:
    """Sums that depend on another one, but for those of rows that are not loaded again."""
    late: set[Value] = set()
    found = []
    held = {op for branch in kernel.ops if branch.code is Code.IF for op in branch.blocks[1].ops}
    for op in kernel.ops:
        if op in held:
            continue
        if op.code in REDUCTIONS and late & set(op.operands):
            found.append(op)
        if op.code in REDUCTIONS or late & set(op.operands):
            late.update(op.results)
    return found


def centred(b: Builder, x: Value, s: Value) -> Value:
    return b.sub(b.mul(x, x), b.mul(x, b.mul(s, b.number(0.5, s))))


def divided(b: Builder, x: Value, s: Value) -> Value:
    return b.neg(b.add(b.div(x, b.mul(s, s)), b.mul(b.mul(x, x), s)))


def scaled(b: Builder, x: Value, s: Value) -> Value:
    return b.sub(b.mul(b.mul(x, x), b.number(3.0, s)), b.mul(x, s))


@pytest.mark.parametrize("second", [centred, divided, scaled])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_sum_that_is_linear_in_an_earlier_one_does_not_wait_for_it(second: Second, rows: int) -> None:
    kernel = by_rows(second, rows=rows)
    assert waiting(kernel)
    apart = again(kernel)
    assert not waiting(apart)
    # A lost sign, factor or divisor would change the gradient.
    torch.testing.assert_close(gradient(apart), gradient(kernel))


def test_what_scales_a_whole_term_scales_its_sum() -> None:
    # A scaled tile beside the plain one is another row in registers.
    (branch,) = [op for op in again(by_rows(scaled)).ops if op.code is Code.IF]
    (total,) = [op for op in branch.blocks[0].ops if op.code is Code.SUM]
    product = total.operands[0].producer
    assert product is not None
    assert product.operands[0] is product.operands[1], "the sum is of x * x"


def test_rows_that_are_kept_have_one_sum_less() -> None:
    kernel = by_rows(centred)
    (branch,) = [op for op in again(kernel).ops if op.code is Code.IF]
    taken, left = ([op.code for op in block.ops].count(Code.SUM) for block in branch.blocks)
    assert (taken, left) == (1, 1), "the sum of x is there already"
    text = triton_source(again(kernel)).text
    assert text.count("if RELOAD:") == 1
    assert text.split("        else:\n")[1].count("tl.sum(") == 1, text


def test_terms_that_wait_for_nothing_are_summed_together() -> None:
    def second(b: Builder, x: Value, s: Value) -> Value:
        return b.add(b.sub(b.mul(x, x), b.mul(x, s)), b.unary(Code.ABS, x))

    (branch,) = [op for op in again(by_rows(second)).ops if op.code is Code.IF]
    assert [op.code for op in branch.blocks[0].ops].count(Code.SUM) == 1  # of x * x + abs(x)
    torch.testing.assert_close(gradient(again(by_rows(second))), gradient(by_rows(second)))


def not_linear(b: Builder, x: Value, s: Value) -> Value:
    return b.unary(Code.ABS, b.sub(x, s))


def not_along_the_row(b: Builder, x: Value, s: Value) -> Value:
    return b.add(x, s)  # the sum of s over the row is s times its lanes, which the tile does not say


@pytest.mark.parametrize("second", [not_linear, not_along_the_row])
def test_a_sum_that_is_not_made_of_sums_still_waits(second: Second) -> None:
    kernel = by_rows(second)
    assert waiting(again(kernel))
    torch.testing.assert_close(gradient(again(kernel)), gradient(kernel))


def test_a_sum_that_another_one_needs_still_waits() -> None:
    # It would have to be in sight of the other, which stands before the branch.
    def second(b: Builder, x: Value, s: Value) -> Value:
        return b.mul(x, b.sum(b.mul(x, b.add(s, s)), 0))

    kernel = by_rows(second)
    torch.testing.assert_close(gradient(again(kernel)), gradient(kernel))


def test_a_factor_of_each_row_stays_in_a_sum_over_rows() -> None:
    # Taken out of the sum it would be another row's.
    def build(b: Builder, x: Value, dx: Value, trips: Value) -> None:
        def body(row: Value, _: list[Value]) -> list[Value]:
            lines = b.add(b.mul(row, b.const(2)), b.arange(0, 2, "ROWS"))
            at = b.add(b.mul(b.expand(lines, 1), b.const(8)), b.expand(b.arange(0, 8, "BLOCK"), 0))
            tile = b.load(x, at)
            columns = b.sum(b.mul(tile, b.expand(b.sum(tile, 1), 1)), 0)
            b.store(dx, at, b.mul(tile, b.expand(columns, 0)))
            return []

        b.loop((b.const(0), trips, b.const(1)), [], body, index_name="row", certain=True, num_stages="STAGES")

    kernel = made("X:*f32 dX:*f32 trips", build, BLOCK=8, STAGES=1, ROWS=2)
    assert waiting(again(kernel))
    torch.testing.assert_close(gradient(again(kernel)), gradient(kernel))
