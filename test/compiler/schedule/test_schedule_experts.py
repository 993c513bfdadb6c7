"""Weights of experts, one of which each tile of rows names, have owners of their tiles, however few they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from schedule_kernels import add_to, block_of, made, matrix
from sorted_rows import stored_and_added

from kernel_agent.compiler.plan import NESTED
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.heirs import Heirs, inherited
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.lines import HELPERS

EXPERTS, TILES, K, N, BLOCK = 3, 40, 8, 12, 4


def weighted() -> Kernel:
    """Programs have a tile of columns and of rows each, and add A' B of every tile of K to the weight of the expert
    that a table names for their rows."""

    def build(b: Builder, x: Value, a: Value, y: Value, dx: Value, table: Value, *numbers: Value) -> None:
        inner, columns, x_e, x_k, x_n = numbers
        n, tile = block_of(b, b.program_id(0), BLOCK, "BLOCK"), b.program_id(1)
        m = block_of(b, tile, BLOCK, "BLOCK")
        expert = b.mul(b.load(table, tile), x_e)
        rows_of_y = b.load(y, matrix(b, m, columns, n, b.const(1)))

        def trip(step: Value, _: list[Value]) -> list[Value]:
            k = block_of(b, step, BLOCK, "BLOCK")
            left = b.load(a, matrix(b, k, b.const(1), m, inner))
            add_to(b, dx, b.add(expert, matrix(b, k, x_k, n, x_n)), b.dot(left, rows_of_y, "ieee"))
            return []

        steps = b.elementwise(Code.FLOORDIV, (inner, b.const(BLOCK, "i32", "BLOCK")))
        b.loop((b.const(0), steps, b.const(1)), [], trip)

    return made("X:*f32 A:*f32 Y:*f32 dX:*f32 Table:*i32 inner columns x_e x_k x_n", build, BLOCK=BLOCK)


def call(**other: Any) -> dict[str, Any]:
    table = torch.arange(TILES) * 7 // 3 % EXPERTS
    return {
        "triton": triton,
        "X": torch.zeros(EXPERTS, K, N),
        "A": torch.randn(TILES * BLOCK, K, dtype=torch.float64),
        "Y": torch.randn(TILES * BLOCK, N, dtype=torch.float64),
        "Table": torch.where(table == 1, 2, table).int(),
        "BLOCK": BLOCK,
        "inner": K,
        "columns": N,
        "x_e": K * N,
        "x_k": N,
        "x_n": 1,
        "grid0": N // BLOCK,
        "grid1": TILES,
        **other,
    }


def heirs() -> Heirs:
    found = inherited(weighted(), "X", "dX", Launch.like_forward(2, Calls((call(),))))
    assert found is not None
    return found


def test_weights_have_the_products_of_all_tiles_that_name_them_and_zero_where_none_does() -> None:
    torch.testing.assert_close(*stored_and_added(weighted(), heirs(), call(), (N // BLOCK, TILES)))


def test_trips_over_places_within_a_weight_are_programs() -> None:
    # Experts are few: a program for each would walk all of a weight's tiles while others have nothing to do.
    assert [extent.text() for extent in heirs().launch.grid[1:]] == ["grid0", "(inner // BLOCK)"]
    assert sum(op.code is Code.FOR for op in heirs().kernel.ops) == 1


@pytest.mark.parametrize(
    ("strides", "holds"),
    [
        pytest.param({}, True, id="rows of a weight one behind the other"),
        pytest.param({"x_k": 1, "x_n": K}, True, id="columns one behind the other"),
        pytest.param({"x_k": N - 1}, False, id="rows that share elements"),
        pytest.param({"x_e": K * N - 1}, False, id="weights that share elements"),
        pytest.param({"x_e": 1, "x_k": EXPERTS * N, "x_n": EXPERTS}, False, id="weights within each other"),
    ],
)
def test_places_in_a_weight_are_asked_to_nest_in_any_order_and_the_weights_to_lie_around_them(
    strides: dict[str, int], holds: bool
) -> None:
    asked = [fact.expression for fact in heirs().facts if not fact.expression.startswith("X.")]
    scope = call(**strides)
    exec(HELPERS[NESTED], scope)
    assert all(eval(text, scope) for text in asked) is holds
