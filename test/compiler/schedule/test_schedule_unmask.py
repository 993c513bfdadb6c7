"""Choices of zero are left out where that changes nothing, and kept where an infinity would meet the zero."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.schedule.unmask import unmasked
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

LANES = 8


def summed(value: Callable[[Builder, Value, Value], Value]) -> Kernel:
    """The sum of what `value` makes of a masked load, in lanes that the mask lets pass."""

    def build(b: Builder, x: Value, y: Value, n: Value) -> None:
        lanes = b.arange(0, LANES)
        mask = b.compare("lt", lanes, n)
        found = value(b, b.load(x, lanes, mask, b.const(0.0, "f32")), mask)
        b.store(y, b.const(0), b.sum(b.select(mask, found, b.const(0.0, "f32")), 0))

    return made("X:*f32 Y:*f32 n", build)


def choices(kernel: Kernel) -> int:
    return sum(op.code is Code.SELECT for op in kernel.ops)


def agrees(kernel: Kernel, n: int) -> bool:
    x = torch.randn(LANES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for one in (kernel, unmasked(kernel)):
        y = torch.full((1,), math.nan, dtype=torch.float64)
        evaluate(one, (1,), {"X": x, "Y": y, "n": n})
        found.append(y.item())
    return found[0] == found[1]


def weighed(factor: Callable[[Builder, Value], Value]) -> Kernel:
    """Of exp of a score that is minus infinity where masked, times a factor."""

    def value(b: Builder, x: Value, mask: Value) -> Value:
        score = b.select(mask, x, b.const(-math.inf, "f32"))
        return b.mul(b.unary(Code.EXP, score), factor(b, x))

    return summed(value)


def test_a_probability_of_zero_needs_no_choice() -> None:
    kernel = weighed(lambda b, x: b.mul(x, x))
    assert choices(unmasked(kernel)) == choices(kernel) - 1
    assert agrees(kernel, 5)


def test_a_zero_that_meets_an_infinity_keeps_its_choice() -> None:
    # 1 / x of padding is infinite: without the choice the sum is NaN.
    kernel = weighed(lambda b, x: b.div(b.const(1.0, "f32"), x))
    assert choices(unmasked(kernel)) == choices(kernel)
    assert agrees(kernel, 5)


def test_a_number_of_the_whole_row_meets_the_lanes_that_count_as_well() -> None:
    # rstd comes of a division: were it infinite, the sum of the lanes that are seen would not be finite either.
    def scaled(b: Builder, x: Value, _: Value) -> Value:
        return b.mul(x, b.div(b.const(1.0, "f32"), b.sum(b.mul(x, x), 0)))

    kernel = summed(scaled)
    assert choices(unmasked(kernel)) == 0
    assert agrees(kernel, 5)


def test_lanes_that_are_summed_with_others_are_seen() -> None:
    kernel = summed(lambda b, x, _: b.add(x, b.const(1.0, "f32")))
    assert choices(unmasked(kernel)) == 1
    assert agrees(kernel, 5)


def test_lanes_that_no_store_writes_are_not_asked_for() -> None:
    def build(b: Builder, x: Value, y: Value, n: Value) -> None:
        lanes = b.arange(0, LANES)
        mask = b.compare("lt", lanes, n)
        found = b.unary(Code.EXP, b.load(x, lanes))
        b.store(y, lanes, b.select(mask, found, b.const(0.0, "f32")), mask)

    kernel = made("X:*f32 Y:*f32 n", build)
    assert choices(unmasked(kernel)) == 0


def test_a_mask_of_another_trip_is_not_taken_for_this_one() -> None:
    # What the last trip chose is stored under the mask of this one: the lane between them would keep its number.
    def build(b: Builder, x: Value, y: Value, n: Value) -> None:
        lanes, zero = b.arange(0, LANES), b.const(0.0, "f32")

        def trip(index: Value, carries: list[Value]) -> list[Value]:
            mask = b.compare("lt", lanes, b.add(index, n))
            b.store(y, lanes, carries[0], mask)
            return [b.select(mask, b.load(x, lanes), zero)]

        b.loop((b.const(0), b.const(2), b.const(1)), [b.whole(zero, (LANES,))], trip)

    kernel = made("X:*f32 Y:*f32 n", build)
    assert choices(unmasked(kernel)) == 1


def test_a_choice_in_a_combine_is_kept() -> None:
    # Lanes of a combine are stored nowhere, which was taken for lanes that nobody looks at: a guarded division by zero
    # lost its guard, and running means of rows that begin with masked lanes became NaN.
    def build(b: Builder, x: Value, y: Value, n: Value) -> None:
        lanes = b.arange(0, LANES)
        mask = b.compare("lt", lanes, n)
        tile = b.load(x, lanes, mask, b.const(0.0, "f32"))
        one, other = Value("f32"), Value("f32")
        block = Block([one, other])
        with b.inside(block):
            total = b.add(one, other)
            guarded = b.select(b.compare("gt", total, b.const(0.0, "f32")), total, b.const(1.0, "f32"))
            block.yields = [b.div(total, guarded)]
        scan = Op(Code.SCAN, [tile], [Value("f32", (LANES,))], {"axis": 0, "reverse": False}, [block])
        b.store(y, lanes, b.add_op(scan).results[0], mask)

    kernel = made("X:*f32 Y:*f32 n", build)
    assert choices(unmasked(kernel)) == choices(kernel) == 1


def steps(b: Builder, x: Value) -> Value:
    """Each step reads the one before it three times: asked anew each time, forty of them take longer than a day."""
    for _ in range(40):
        x = b.add(x, b.mul(x, x))
    return x


@pytest.mark.timeout(60)
def test_what_vanishes_is_asked_of_each_value_once() -> None:
    kernel = summed(lambda b, x, _: steps(b, x))
    assert choices(unmasked(kernel)) == choices(kernel) - 1


@pytest.mark.timeout(60)
def test_what_is_finite_is_asked_of_each_value_once() -> None:
    kernel = weighed(steps)
    assert choices(unmasked(kernel)) == choices(kernel) - 1
