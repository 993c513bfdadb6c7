"""A loop over a group as one long row goes through its channels and places where another loop does, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from schedule_kernels import add_to, made
from torch import Tensor

from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.schedule.relaid import relaid
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK_K, BLOCK_L = 4, 2
CONSTANTS = {"BLOCK_K": BLOCK_K, "BLOCK_L": BLOCK_L}
GROUPS, K, L = 2, 3, 5
Adds = Callable[[Builder, Value, Value, Value, Value, Value], Value]
"""What the long row's loop adds, from X, offsets, their mask, lanes and the index."""


def what_lies_there(b: Builder, x: Value, at: Value, mask: Value, lanes: Value, start: Value) -> Value:
    return b.mul(b.load(x, at, mask, b.const(0.0, "f32")), b.select(mask, b.const(3.0, "f32"), b.const(0.0, "f32")))


def group(adds: Adds = what_lies_there, *, missing: int = 0, from_row: int = 0, rows_first: bool = True) -> Kernel:
    """Adds X to dX by channels and places of a group, and something more by one row of `missing` elements fewer."""

    def build(b: Builder, x: Value, dx: Value, k: Value, length: Value) -> None:
        zero, size = b.const(0), b.mul(k, length)
        base = b.mul(b.program_id(0), size)
        channels, places = b.arange(0, BLOCK_K, "BLOCK_K"), b.arange(0, BLOCK_L, "BLOCK_L")
        row = b.arange(0, BLOCK_K * BLOCK_L, "(BLOCK_K * BLOCK_L)")

        def tile(start: Value, _: list[Value]) -> list[Value]:
            at = b.add(start, places)
            mask = b.logical_and(b.expand(b.compare("lt", channels, k), 1), b.expand(b.compare("lt", at, length), 0))
            offset = b.add(b.add(base, b.mul(b.expand(channels, 1), length)), b.expand(at, 0))
            add_to(b, dx, offset, b.load(x, offset, mask, b.const(0.0, "f32")), mask)
            return []

        def piece(start: Value, _: list[Value]) -> list[Value]:
            inside = b.add(start, row)
            mask = b.compare("lt", inside, b.sub(size, b.const(missing)))
            offset = b.add(b.add(base, b.const(from_row)), inside)
            add_to(b, dx, offset, adds(b, x, offset, mask, row, start), mask)
            return []

        loops = [
            lambda: b.loop((zero, length, b.const(BLOCK_L, "i32", "BLOCK_L")), [], tile),
            lambda: b.loop((zero, size, b.const(BLOCK_K * BLOCK_L, "i32", "(BLOCK_K * BLOCK_L)")), [], piece),
        ]
        for loop in loops if rows_first else loops[::-1]:
            loop()

    return made("X:*f32 dX:*f32 K L", build, **CONSTANTS)


def launched(*calls: dict[str, object]) -> Launch:
    return Launch.like_forward(1, Calls(calls))


def gradient(kernel: Kernel) -> Tensor:
    memory = torch.zeros(GROUPS, K, L)
    x = torch.arange(1.0, GROUPS * K * L + 1).reshape(GROUPS, K, L)
    evaluate(kernel, (GROUPS,), {"X": x, "dX": memory, "K": K, "L": L})
    return memory


def additions(kernel: Kernel) -> int:
    return sum(op.code is Code.ATOMIC_ADD for op in kernel.ops)


@pytest.mark.parametrize("rows_first", [True, False])
def test_two_orders_of_a_group_become_one_addition(rows_first: bool) -> None:
    # Two additions in two orders are two buffers, or atomics in memory. The last tile has 1 of 2 places, and 3 of 4
    # channels: lanes that are no element must add nothing.
    kernel = group(rows_first=rows_first)
    found = relaid(kernel, launched())
    assert found is not None
    assert additions(kernel) == 2
    assert additions(merged(found.kernel)) == 1
    assert torch.equal(gradient(merged(found.kernel)), gradient(kernel))
    assert [claim.text() for claim in found.claims] == ["BLOCK_K >= K"]


def test_more_channels_than_a_tile_has_keep_both_loops() -> None:
    # A tile of 4 channels leaves out the fifth, which the long row has.
    assert relaid(group(), launched({"K": 4, "L": 5, **CONSTANTS})) is not None
    assert relaid(group(), launched({"K": 5, "L": 5, **CONSTANTS})) is None


@pytest.mark.parametrize("other", [{"missing": 1}, {"from_row": 1}])
def test_other_elements_than_those_of_the_group_keep_their_loop(other: dict[str, int]) -> None:
    # Channels and places have the last element, and begin with the first.
    assert relaid(group(**other), launched()) is None


def its_lane(b: Builder, x: Value, at: Value, mask: Value, lanes: Value, start: Value) -> Value:
    return b.cast(lanes, "f32")


def its_piece(b: Builder, x: Value, at: Value, mask: Value, lanes: Value, start: Value) -> Value:
    return b.cast(start, "f32")


def its_neighbour(b: Builder, x: Value, at: Value, mask: Value, lanes: Value, start: Value) -> Value:
    return b.load(x, b.add(at, b.const(1)), mask, b.const(0.0, "f32"))


def the_sum_of_its_piece(b: Builder, x: Value, at: Value, mask: Value, lanes: Value, start: Value) -> Value:
    return b.mul(b.sum(b.load(x, at, mask, b.const(0.0, "f32")), 0), b.load(x, at, mask, b.const(0.0, "f32")))


@pytest.mark.parametrize("adds", [its_lane, its_piece, its_neighbour, the_sum_of_its_piece])
def test_what_depends_on_more_than_the_element_keeps_its_loop(adds: Adds) -> None:
    # In a tile an element has another lane, another trip, other elements beside it.
    assert relaid(group(adds), launched()) is None


def test_the_plan_checks_that_a_tile_has_all_channels_and_stores() -> None:
    # Without the check a call with more channels would leave their gradients undefined.
    kernel = group()
    adjoint = Adjoint(kernel, {}, {"X": "dX"}, ())
    found = {plan.schedule: plan for plan in plans(kernel, adjoint, 1)}
    assert "BLOCK_K >= K" in [fact.expression for fact in found["owned"].facts]
    (step,) = found["owned"].steps
    assert [op.code for op in step.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.STORE]
