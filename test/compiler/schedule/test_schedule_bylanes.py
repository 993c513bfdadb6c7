"""Numbers that a loop adds up from sums of its tiles are added up lane by lane, and summed behind the loop."""

from __future__ import annotations

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.schedule.bylanes import by_lanes
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

LANES = 8


def summing(*, subtracted: bool = False, start: float = 0.0, sums: int = 1, reads_carry: bool = False) -> Kernel:
    """Y[k] = start + or - the sum of X ** (k + 1), n lanes of it, in tiles of LANES."""

    def build(b: Builder, x: Value, y: Value, n: Value) -> None:
        def body(index: Value, carries: list[Value]) -> list[Value]:
            cols = b.add(index, b.arange(0, LANES, "LANES"))
            tile = term = b.load(x, cols, b.compare("lt", cols, n), b.const(0.0, "f32"))
            if reads_carry:
                term = b.add(tile, carries[0])
            found = []
            for carry in carries:
                total = b.sum(term, 0)
                found.append(b.sub(carry, total) if subtracted else b.add(carry, total))
                term = b.mul(term, tile)
            return found

        bounds = (b.const(0), n, b.const(LANES))
        totals = b.loop(bounds, [b.const(start, "f32")] * sums, body, names=[f"total{k}" for k in range(sums)])
        for k, total in enumerate(totals):
            b.store(y, b.const(k), total)

    return made("X:*f32 Y:*f32 n", build, LANES=LANES)


def result(kernel: Kernel) -> torch.Tensor:
    x = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.full((3,), torch.nan, dtype=torch.float64)
    evaluate(kernel, (1,), {"X": x, "Y": y, "n": 19})
    return y


def sums_in_loops(kernel: Kernel) -> int:
    return sum(op.code is Code.SUM for loop in kernel.ops if loop.code is Code.FOR for op in loop.blocks[0].ops)


@pytest.mark.parametrize("start", [0.0, 2.5])
@pytest.mark.parametrize("subtracted", [False, True])
def test_a_sum_of_tiles_is_taken_once_behind_the_loop(subtracted: bool, start: float) -> None:
    # A start that was given to every lane, or a sign that was lost, would change the number.
    kernel = summing(subtracted=subtracted, start=start)
    assert sums_in_loops(kernel) == 1
    moved = by_lanes(kernel)
    verify(moved)
    assert sums_in_loops(moved) == 0
    assert [op.code for op in moved.body.ops].count(Code.SUM) == 1
    torch.testing.assert_close(result(moved), result(kernel), equal_nan=True)


def test_two_sums_of_a_loop_have_tiles_of_their_own() -> None:
    # The second sum's tile is made of the first one's, which must not be taken for it.
    kernel = summing(sums=2)
    moved = by_lanes(kernel)
    assert sums_in_loops(moved) == 0
    torch.testing.assert_close(result(moved), result(kernel), equal_nan=True)


def test_more_sums_than_registers_hold_tiles_of_stay_in_the_loop() -> None:
    kernel = summing(sums=3)
    assert by_lanes(kernel) is kernel


def test_a_sum_of_what_earlier_trips_summed_stays_in_the_loop() -> None:
    # Lanes know only their own part of the sum so far.
    kernel = summing(reads_carry=True)
    assert by_lanes(kernel) is kernel
