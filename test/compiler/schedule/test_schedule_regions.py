"""Parts of one gradient that lie apart are owned, each as if it had memory to itself, and others are not."""

from __future__ import annotations

import pytest
import torch
from schedule_kernels import add_to, block_of, made, matrix

from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.regions import apart
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK = 4
ARGUMENTS = "X:*f32 dX:*f32 n width"


def planes(first: int, second: int, *, wide: bool = False) -> Kernel:
    """Two tiles of rows by columns, of the columns from `first` and `second` times the width on; rows are as long as
    three parts. The second's rows are those of another axis of the grid. `wide`: a part has a column too many."""

    def build(b: Builder, x: Value, dx: Value, n: Value, width: Value) -> None:
        cols = b.arange(0, 8, "COLS")
        end = b.add(width, b.const(1)) if wide else width
        inside = b.expand(b.compare("lt", cols, end), 0)
        for axis, part in enumerate((first, second)):
            rows = block_of(b, b.program_id(axis), BLOCK, "BLOCK")
            mask = b.logical_and(b.expand(b.compare("lt", rows, n), 1), inside)
            start = b.add(b.mul(width, b.const(part)), cols)
            add_to(b, dx, matrix(b, rows, b.mul(width, b.const(3)), start, b.const(1)), b.const(1.0, "f32"), mask)

    return made(ARGUMENTS, build, BLOCK=BLOCK, COLS=8)


def halves(head: int, tail_from: int) -> Kernel:
    """Columns 0 to `head` of a row, and those from `tail_from` on, as far as the row has them, of other rows."""

    def build(b: Builder, x: Value, dx: Value, n: Value, width: Value) -> None:
        for axis, (start, size) in enumerate(((0, head), (tail_from, 4))):
            rows = block_of(b, b.program_id(axis), BLOCK, "BLOCK")
            cols = b.add(b.arange(0, size), b.const(start))
            there = b.compare("lt", rows, n), b.compare("lt", cols, width)
            mask = b.logical_and(b.expand(there[0], 1), b.expand(there[1], 0))
            add_to(b, dx, matrix(b, rows, width, cols, b.const(1)), b.const(1.0, "f32"), mask)

    return made(ARGUMENTS, build, BLOCK=BLOCK)


def are_apart(kernel: Kernel, width: int) -> bool:
    one, other = sites(kernel.body, frozenset((Code.ATOMIC_ADD,)))
    seen = Calls(({"n": 6, "width": width, "grid0": 2, "grid1": 2, **kernel.constants},))
    return apart(Forms(kernel, Launch.like_forward(2, seen)), one, other) is not None


@pytest.mark.parametrize(
    ("kernel", "width", "expected"),
    [
        pytest.param(planes(0, 1), 5, True, id="parts of rows, one behind the other"),
        pytest.param(planes(2, 0), 5, True, id="parts of rows, the second in front"),
        pytest.param(planes(1, 1), 5, False, id="one part"),
        pytest.param(planes(0, 1, wide=True), 5, False, id="a column that is the next part's"),
        pytest.param(planes(0, 3), 5, False, id="the first part of the next row"),
        pytest.param(halves(8, 8), 12, True, id="halves that meet at a border"),
        pytest.param(halves(8, 7), 12, False, id="halves that have a column in common"),
    ],
)
def test_places_are_apart_only_where_a_digit_of_their_addresses_differs_for_all_rows(
    kernel: Kernel, width: int, *, expected: bool
) -> None:
    # Rows of the two places are of different programs: a column that both have is added to by two of them.
    assert are_apart(kernel, width) is expected


def counted_down(b: Builder, dx: Value, n: Value, width: Value, *, back: bool) -> None:
    """A plane of rows by columns, and one behind it of columns by rows, `back`: from its last element to its first."""
    rows, cols = (block_of(b, b.program_id(axis), BLOCK, "BLOCK") for axis in (0, 1))
    mask = b.logical_and(b.expand(b.compare("lt", rows, n), 1), b.expand(b.compare("lt", cols, width), 0))
    add_to(b, dx, matrix(b, rows, width, cols, b.const(1)), b.const(1.0, "f32"), mask)
    turned = matrix(b, rows, b.const(1), cols, n)
    plane = b.mul(n, width)
    if back:
        turned = b.sub(b.sub(plane, b.const(1)), turned)
    add_to(b, dx, b.add(plane, turned), b.const(2.0, "f32"), mask)


@pytest.mark.parametrize("back", [False, True])
def test_planes_in_orders_of_their_own_are_stored_and_cover_the_tensor_together(back: bool) -> None:
    # With one of the two forgotten the other would leave NaN where it starts empty.
    def build(b: Builder, x: Value, dx: Value, n: Value, width: Value) -> None:
        counted_down(b, dx, n, width, back=back)

    n, width = 6, 7
    names = {"X": torch.zeros(2, n, width), "n": n, "width": width, "grid0": 2, "grid1": 2, "BLOCK": BLOCK}
    kernel = made(ARGUMENTS, build, BLOCK=BLOCK)
    found = plans(kernel, Adjoint(kernel, {}, {"X": "dX"}, ()), 2, calls=Calls((names,)))[0]
    (step,) = found.steps
    assert {op.code for op in step.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)} == {Code.STORE}
    (buffer,) = found.buffers
    assert buffer.empty_if == "X.numel() == 2 * n * width and BLOCK * grid0 >= n and BLOCK * grid1 >= width"
    expected, got = torch.zeros(2 * n * width), torch.full((2 * n * width,), torch.nan)
    for text, memory in ((kernel, expected), (step.kernel, got)):
        evaluate(text, (2, 2), {"X": names["X"], "dX": memory, "n": n, "width": width})
    assert torch.equal(got, expected)
