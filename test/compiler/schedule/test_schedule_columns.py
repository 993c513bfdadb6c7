"""What the trips of a loop add to one column of a tile each becomes part of the addition to the tile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from schedule_kernels import add_to, made, matrix

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.columns import MOST, with_columns
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.gather import Gathered
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

ROWS, WIDE, COLUMNS, LENGTH = 4, 8, 5, 10


def columns_and_tile(order: str = "columns first", *, limit: str = "K", shift: int = 0, wide: int = WIDE) -> Kernel:
    """Trip k adds x to column `k + shift` of a program's rows; behind it, 1 is added to all columns below a limit."""

    def build(b: Builder, x: Value, dx: Value, n: Value, k: Value, fewer: Value) -> None:
        rows = b.add(b.mul(b.program_id(0), b.const(ROWS)), b.arange(0, ROWS, "ROWS"))
        cols = b.arange(0, wide, "WIDE")
        there = b.compare("lt", rows, n)
        given = b.load(x, rows, there, b.const(0.0, "f32"))

        def body(trip: Value, sums: Sequence[Value]) -> Sequence[Value]:
            at = b.add(b.mul(rows, k), b.add(trip, b.const(shift)))
            add_to(b, dx, at, given, there)
            return [b.add(sums[0], given)]

        def trips() -> Value:
            (total,) = b.loop((b.const(0), k, b.const(1)), [b.whole(b.const(0.0, "f32"), (ROWS,))], body)
            return total

        total = trips() if order == "columns first" else given
        end = {"K": k, "fewer": fewer}[limit]
        mask = b.logical_and(b.expand(there, 1), b.expand(b.compare("lt", cols, end), 0))
        add_to(b, dx, matrix(b, rows, k, cols, b.const(1)), b.whole(b.expand(total, 1), (ROWS, wide)), mask)
        if order == "tile first":
            trips()

    return made("X:*f32 dX:*f32 N K fewer", build, ROWS=ROWS, WIDE=wide)


def joined(kernel: Kernel, *calls: dict[str, object]) -> Gathered:
    return with_columns(Gathered(kernel), Launch.like_forward(1, Calls(calls)))


def additions(kernel: Kernel) -> int:
    return sum(op.code is Code.ATOMIC_ADD for op in kernel.ops)


def gradient(kernel: Kernel) -> torch.Tensor:
    dx = torch.zeros(LENGTH + 1, COLUMNS, dtype=torch.float64)
    given = {"X": torch.arange(1.0, LENGTH + 1, dtype=torch.float64), "dX": dx, "N": LENGTH, "K": COLUMNS, "fewer": 3}
    evaluate(kernel, (3,), {value.name: given[value.name] for value in kernel.arguments})
    return dx


def test_columns_that_trips_add_to_are_added_with_their_tile() -> None:
    plain = columns_and_tile()
    found = joined(plain)
    assert additions(plain) == 2
    assert additions(found.kernel) == 1
    torch.testing.assert_close(gradient(found.kernel), gradient(plain))


def test_the_tile_must_have_a_lane_for_every_trip() -> None:
    # A trip that no lane of the tile stands for would be left out of the gradient without a word.
    found = joined(columns_and_tile())
    assert [claim.text() for claim in found.claims] == ["WIDE >= K"]
    assert additions(joined(columns_and_tile(), {"WIDE": 8, "K": 9}).kernel) == 2


@pytest.mark.parametrize(
    "plain",
    [
        pytest.param(columns_and_tile(limit="fewer"), id="a mask that leaves out columns that trips add to"),
        pytest.param(columns_and_tile(shift=1), id="columns beside those of the trips' numbers"),
        pytest.param(columns_and_tile("tile first"), id="columns that are known when the tile was added to"),
        pytest.param(columns_and_tile(wide=2 * MOST), id="a tile that is too wide to go through in every trip"),
    ],
)
def test_other_columns_stay_additions_of_their_own(plain: Kernel) -> None:
    # Of the first three the sum would be another one: lanes that are not stored, the wrong lanes, or no sum yet.
    assert additions(joined(plain).kernel) == 2
