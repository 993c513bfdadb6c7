"""Products that are added have their common factors multiplied once."""

from __future__ import annotations

import torch
from schedule_kernels import made

from kernel_agent.compiler.schedule.collect import collected
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK = 8


def gradient_of_softmax(*, reads_again: bool = False) -> Kernel:
    """dx = dy y s - total y s, and y s besides where that is read again."""

    def build(b: Builder, y: Value, dy: Value, dx: Value, other: Value, scale: Value, total: Value) -> None:
        lane = b.arange(0, BLOCK, "BLOCK")
        values = b.load(y, lane)
        scaled = b.mul(b.mul(total, values), scale)
        b.store(dx, lane, b.sub(b.mul(b.mul(b.load(dy, lane), values), scale), scaled))
        if reads_again:
            b.store(other, lane, scaled)

    return made("Y:*f32 dY:*f32 dX:*f32 dZ:*f32 scale:f32 total:f32", build, BLOCK=BLOCK)


def multiplications(kernel: Kernel) -> int:
    return sum(op.code is Code.MUL for op in kernel.ops)


def result(kernel: Kernel) -> torch.Tensor:
    torch.manual_seed(0)
    y, dy = torch.randn(2, BLOCK, dtype=torch.float64)
    given = {"Y": y, "dY": dy, "dX": torch.zeros_like(y), "dZ": torch.zeros_like(y), "scale": 0.5, "total": 1.25}
    evaluate(kernel, (1,), {value.name: given[value.name] for value in kernel.arguments})
    return torch.cat([given["dX"], given["dZ"]])


def test_common_factors_are_multiplied_once() -> None:
    plain = gradient_of_softmax()
    found = collected(plain)
    assert (multiplications(plain), multiplications(found)) == (4, 2)
    torch.testing.assert_close(result(found), result(plain))


def test_a_product_that_is_read_elsewhere_stays_as_it_is() -> None:
    # It has to be computed anyway: taken apart it would be computed twice.
    plain = gradient_of_softmax(reads_again=True)
    found = collected(plain)
    assert multiplications(found) <= multiplications(plain)
    torch.testing.assert_close(result(found), result(plain))


def test_a_value_added_to_a_multiple_of_itself_is_one_product() -> None:
    def build(b: Builder, x: Value, dx: Value) -> None:
        lane = b.arange(0, BLOCK, "BLOCK")
        value, other = b.load(x, lane), b.load(x, b.add(lane, b.const(BLOCK)))
        b.store(dx, lane, b.add(value, b.mul(other, value)))

    kernel = made("X:*f32 dX:*f32", build, BLOCK=BLOCK)
    x = torch.randn(2 * BLOCK, dtype=torch.float64)
    dx = torch.zeros(BLOCK, dtype=torch.float64)
    evaluate(collected(kernel), (1,), {"X": x, "dX": dx})
    torch.testing.assert_close(dx, x[:BLOCK] * (1 + x[BLOCK:]))


def test_a_constant_is_multiplied_with_the_number_of_the_row() -> None:
    def build(b: Builder, x: Value, dx: Value, scale: Value) -> None:
        lane = b.arange(0, BLOCK, "BLOCK")
        b.store(dx, lane, b.mul(scale, b.mul(b.load(x, lane), b.const(2.0, "f32"))))

    found = collected(made("X:*f32 dX:*f32 scale:f32", build, BLOCK=BLOCK))
    assert [op.result.shape for op in found.ops if op.code is Code.MUL] == [(), (BLOCK,)]
    x, dx = torch.randn(BLOCK, dtype=torch.float64), torch.zeros(BLOCK, dtype=torch.float64)
    evaluate(found, (1,), {"X": x, "dX": dx, "scale": 0.75})
    torch.testing.assert_close(dx, 1.5 * x)
