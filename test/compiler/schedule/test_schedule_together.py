"""A launch that has one program where another one has a few does their work in turn, if both read the same tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedule_kernels import made

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.together import Step, together
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

ROWS, COLUMNS, BLOCK = 3, 5, 8
ARGUMENTS = "dS:*f32 Own:*f32 Other:*f32 C"


def _tile(b: Builder, dy: Value, *, apart: bool = False) -> Value:
    """The tile of a row of programs; `apart`, one that differs from column to column."""
    row = b.add(b.program_id(0), b.program_id(1)) if apart else b.program_id(0)
    up, along = b.expand(b.arange(0, BLOCK), 1), b.expand(b.arange(0, BLOCK), 0)
    at = b.add(b.mul(row, b.const(BLOCK * BLOCK)), b.add(b.mul(up, b.const(BLOCK)), along))
    return b.load(dy, at, None, None)


def _lone() -> Kernel:
    """Stores the sums of the rows of a tile."""

    def build(b: Builder, dy: Value, own: Value, other: Value, count: Value) -> None:
        at = b.add(b.mul(b.program_id(0), b.const(BLOCK)), b.arange(0, BLOCK))
        b.store(own, at, b.sum(_tile(b, dy), 1), None)

    return made(ARGUMENTS, build)


def _several(*, apart: bool = False, reads: bool = False, product: bool = False) -> Kernel:
    """For each column, stores the sums of a tile's columns, times its number and one more."""

    def build(b: Builder, dy: Value, own: Value, other: Value, count: Value) -> None:
        row, column = b.program_id(0), b.program_id(1)
        at = b.add(b.mul(b.add(b.mul(row, count), column), b.const(BLOCK)), b.arange(0, BLOCK))
        tile = _tile(b, dy, apart=apart)
        if product:
            tile = b.dot(tile, tile)
        weight = b.cast(b.add(column, b.const(1)), "f32")
        total = b.mul(b.sum(tile, 0), weight)
        if reads:
            total = b.add(total, b.load(own, b.arange(0, BLOCK), None, None))
        b.store(other, at, total, None)

    return made(ARGUMENTS, build)


def _steps(several: Kernel, columns: int = COLUMNS) -> list[Step]:
    calls = Calls(({"C": columns, "grid0": ROWS},))
    rows = Polynomial.symbol("grid0", positive=True)
    one = (_lone(), Launch((rows, ONE), calls=calls), {})
    return [(several, Launch((rows, Polynomial.symbol("C")), calls=calls), {}), one]


def _stored(steps: list[Step]) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    given = {
        "dS": torch.randn((ROWS + COLUMNS) * BLOCK * BLOCK, dtype=torch.float64, generator=random),
        "Own": torch.zeros(ROWS * BLOCK, dtype=torch.float64),
        "Other": torch.zeros(ROWS * COLUMNS * BLOCK, dtype=torch.float64),
        "C": COLUMNS,
    }  # fmt: skip
    for kernel, launch, _ in steps:
        evaluate(kernel, (ROWS, 1 if launch.grid[1] == ONE else COLUMNS), given)
    return given


def test_a_few_columns_are_done_in_turn_by_the_owner_of_their_rows() -> None:
    # A turn that took another column than its own, or rows of another program, would store other sums.
    apart = _steps(_several())
    joint = together(apart)
    ((kernel, launch, _),) = joint
    assert launch.grid[1] == ONE
    (loop,) = [op for op in kernel.ops if op.code is Code.FOR]
    assert loop.operands[1].name == "C"
    expected = _stored(apart)
    for name, found in _stored(joint).items():
        if name != "C":
            assert expected[name].abs().max() > 0
            torch.testing.assert_close(found, expected[name])


def test_many_columns_keep_their_programs() -> None:
    assert len(together(_steps(_several(), columns=64))) == 2


def test_tiles_that_differ_from_column_to_column_keep_their_programs() -> None:
    # Nothing would be read once that is read twice.
    assert len(together(_steps(_several(apart=True)))) == 2


def test_what_reads_the_results_of_the_other_launch_stays_behind_it() -> None:
    # Programs of one launch do not wait for each other.
    assert len(together(_steps(_several(reads=True)))) == 2


def test_products_keep_their_programs() -> None:
    assert len(together(_steps(_several(product=True)))) == 2


def _owner(*, starts: int = 0, loads: bool = True) -> Kernel:
    """Sums over all columns the sums of the rows of their tiles."""

    def build(b: Builder, dy: Value, own: Value, other: Value, count: Value) -> None:
        row, zero = b.program_id(0), b.const(0.0, "f32")
        at = b.add(b.mul(row, b.const(BLOCK)), b.arange(0, BLOCK))

        def trip(column: Value, carries: list[Value]) -> list[Value]:
            up, along = b.expand(b.arange(0, BLOCK), 1), b.expand(b.arange(0, BLOCK), 0)
            corner = b.mul(b.add(row, column), b.const(BLOCK * BLOCK))
            at = b.add(b.mul(up, b.const(BLOCK)), along) if loads else b.arange(0, BLOCK)
            tile = b.load(dy, b.add(corner, at), None, None)
            return [b.add(carries[0], b.sum(tile, 1) if loads else tile)]

        (total,) = b.loop((b.const(starts), count, b.const(1)), [b.whole(zero, (BLOCK,))], trip, certain=True)
        b.store(own, at, total, None)

    return made("dS:*f32 Own:*f32 Other:*f32 C", build)


def _through_all(owner: Kernel, **change: bool) -> list[Step]:
    calls = Calls(({"C": COLUMNS, "grid0": ROWS},))
    rows, columns = Polynomial.symbol("grid0", positive=True), Polynomial.symbol("C")
    several = (_several(apart=True, **change), Launch((rows, columns), calls=calls), {})
    return [several, (owner, Launch((rows, ONE), {"C": columns}, calls), {})]


def test_an_owner_that_goes_through_all_programs_of_a_launch_does_their_work_in_its_trips() -> None:
    # A trip that did the work of another program than the one whose tile it loads would store other sums.
    apart = _through_all(_owner())
    joint = together(apart)
    ((kernel, launch, _),) = joint
    assert launch.grid[1] == ONE
    (loop,) = [op for op in kernel.ops if op.code is Code.FOR]
    assert sum(op.code is Code.LOAD for op in loop.blocks[0].ops) == 1
    expected = _stored(apart)
    for name, found in _stored(joint).items():
        if name != "C":
            assert expected[name].abs().max() > 0
            torch.testing.assert_close(found, expected[name])


@pytest.mark.parametrize(
    "steps",
    [_through_all(_owner(starts=1)), _through_all(_owner(loads=False)), _through_all(_owner(), reads=True),
     _through_all(_owner(), product=True)],
    ids=["not all trips", "other loads", "reads what the owner stores", "products"],
)  # fmt: skip
def test_an_owner_leaves_work_that_its_trips_have_no_part_in_to_programs_of_their_own(steps: list[Step]) -> None:
    # The first program would be left out; many programs would wait for one that loads little; sums that are not there
    # yet would be read; and products have tiles of their own.
    assert len(together(steps)) == 2
