"""Loads for the next trip: made in that trip where the address and the mask show what they are."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.compiler.saved.prefetch import without_prefetch
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

N = 8


def ahead(change: str = "") -> Kernel:
    """h = tanh(h + x[pid, t]) for t below n, where x[pid, t + 1] is loaded in trip t; Y[pid] = h."""

    x, y, n = arguments = [Value(element, (), name) for name, element in (("X", "*f32"), ("Y", "*f32"), ("n", "i32"))]
    kernel = Kernel("forward", arguments)
    b = Builder(kernel)
    lanes = b.arange(0, N)
    row = b.add(b.mul(b.mul(b.program_id(0), n), b.const(N)), lanes)
    zero = b.const(0.0, "f32")
    mask = b.compare("lt", lanes, b.const(N - 1))

    def body(index: Value, carries: list[Value]) -> list[Value]:
        far = b.const(2 * N if change == "two ahead" else N)
        at = b.add(b.add(row, b.mul(index, b.const(N))), far)
        end = b.sub(n, b.const(1)) if change == "the last one is missing" else n
        there = b.logical_and(mask, b.compare("lt", b.add(index, b.const(1)), end))
        if change == "other lanes":
            there = b.compare("lt", b.add(index, b.const(1)), end)
        padding = b.const(1.0, "f32") if change == "other padding" else zero
        return [b.unary(Code.TANH, b.add(carries[0], carries[1])), b.load(x, at, there, padding)]

    first = b.load(x, row, mask, zero)
    h, last = b.loop((b.const(0), n, b.const(1)), [b.whole(zero, (N,)), first], body, names=["h", "x"])
    if change == "read behind the loop":
        h = b.add(h, last)
    b.store(y, b.add(b.mul(b.program_id(0), b.const(N)), lanes), h)
    return kernel


def carries(kernel: Kernel) -> int:
    (loop,) = (op for op in kernel.ops if op.code is Code.FOR)
    return len(loop.results)


@pytest.mark.parametrize("trips", [1, 4])
def test_a_value_that_is_loaded_ahead_is_loaded_in_the_trip_that_uses_it(trips: int) -> None:
    kernel, found = ahead(), without_prefetch(ahead())
    assert (carries(kernel), carries(found)) == (2, 1)
    x = torch.randn(3, trips, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for one in (kernel, found):
        y = torch.full((3, N), torch.nan, dtype=torch.float64)
        evaluate(one, (3,), {"X": x, "Y": y, "n": trips})
        results.append(y)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "change", ["two ahead", "the last one is missing", "other lanes", "other padding", "read behind the loop"]
)
def test_what_is_not_the_value_of_the_next_trip_stays_a_carry(change: str) -> None:
    # Each differs from a load ahead in one thing, and would give other numbers if it were taken for one.
    kernel = ahead(change)
    assert carries(without_prefetch(kernel)) == carries(kernel) == 2
