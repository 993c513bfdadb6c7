"""Choices of zero by rows are made for a number of the row, where every other factor is a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.schedule.rowwise import rowwise
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

ROWS, COLUMNS = 4, 8
Chosen = Callable[[Builder, Value, Value], Value]
"""Of a tile of numbers and a factor of each row, (ROWS, 1), infinite where a row does not count."""


def kernel_of(chosen: Chosen) -> Kernel:
    """Y = what is chosen in the first n rows, and zero in the others."""

    def build(b: Builder, x: Value, y: Value, n: Value) -> None:
        rows, cols = b.arange(0, ROWS, "ROWS"), b.arange(0, COLUMNS, "COLUMNS")
        at = b.add(b.mul(b.expand(rows, 1), b.const(COLUMNS)), b.expand(cols, 0))
        inside = b.compare("lt", rows, n)
        tile = b.load(x, at)
        number = b.div(b.const(1.0, "f32"), b.cast(inside, "f32"))  # one, or infinity
        value = chosen(b, tile, b.expand(number, 1))
        b.store(y, at, b.select(b.expand(inside, 1), value, b.const(0.0, "f32")))

    return made("X:*f32 Y:*f32 n", build, ROWS=ROWS, COLUMNS=COLUMNS)


def result(kernel: Kernel) -> torch.Tensor:
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.full_like(x, torch.nan)
    evaluate(kernel, (1,), {"X": x, "Y": y, "n": 3})
    return y


def chosen_lanes(kernel: Kernel) -> list[int]:
    """Lanes of each choice."""
    return [op.operands[1].shape[1] for op in kernel.ops if op.code is Code.SELECT]


@pytest.mark.parametrize(
    "chosen",
    [lambda b, x, s: b.mul(x, b.mul(x, s)), lambda b, x, s: b.mul(b.mul(s, x), x), lambda b, x, s: b.mul(x, s)],
    ids=["right", "left", "two factors"],
)
def test_a_choice_by_rows_is_made_for_the_factor_of_the_row(chosen: Chosen) -> None:
    kernel = kernel_of(chosen)
    assert chosen_lanes(kernel) == [COLUMNS]
    moved = rowwise(kernel)
    verify(moved)
    assert chosen_lanes(moved) == [1]
    # Were the factor itself not chosen, infinity times zero would be NaN in the last row.
    torch.testing.assert_close(result(moved), result(kernel))
    assert not result(moved)[3].any()


def test_a_choice_stays_where_another_factor_may_be_no_number() -> None:
    # exp of a large number is infinite, and zero times that is NaN.
    kernel = kernel_of(lambda b, x, s: b.mul(b.unary(Code.EXP, x), s))
    assert rowwise(kernel) is kernel


def test_a_choice_stays_where_its_product_is_read_elsewhere() -> None:
    # Else the product would be computed twice.
    def chosen(b: Builder, x: Value, s: Value) -> Value:
        product = b.mul(x, s)
        b.store(b.kernel.argument("Y"), b.const(0), b.sum(b.sum(product, 1), 0))
        return product

    kernel = kernel_of(chosen)
    assert rowwise(kernel) is kernel
