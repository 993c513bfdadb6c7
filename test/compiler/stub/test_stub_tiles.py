"""A launch of a backward takes another tile only where all that counts tiles follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.tiles import axes_of_tiles, tiles_of_axes

BLOCK = 16


def rows_from(number: Callable[[Builder, Value], Value]) -> Kernel:
    """A kernel that stores to the rows of one tile, by its number."""
    out, count = Value("*f32", (), "Out"), Value("i32", (), "count")
    kernel = Kernel("rows", [out, count], extents={BLOCK: "BLOCK"}, constants={"BLOCK": BLOCK})
    b = Builder(kernel, frozenset((out,)))
    first = b.mul(number(b, count), b.const(BLOCK, "i32", "BLOCK"))
    b.store(out, b.add(first, b.arange(0, BLOCK, "BLOCK")), b.whole(b.const(0.0, "f32"), (BLOCK,)))
    return kernel


def from_the_end(b: Builder, _: Value) -> Value:
    return b.sub(b.sub(b.num_programs(0), b.const(1)), b.program_id(0))


def test_programs_counted_from_the_end_are_an_axis_of_the_tile() -> None:
    # the grid kept the forward's extent while the kernel took smaller tiles: three quarters of the rows had no owner
    kernel = rows_from(from_the_end)
    assert tiles_of_axes(kernel) == {0: "BLOCK"}
    assert axes_of_tiles(kernel) == {"BLOCK": frozenset((0,))}


def test_programs_in_the_tile_of_a_group_are_not_counted_by_its_axis_alone() -> None:
    # an extent of cdiv(n, BLOCK) * heads has programs of other things: the text alone says which factor is which
    kernel = rows_from(lambda b, count: b.elementwise(Code.FLOORDIV, (b.program_id(0), count)))
    assert tiles_of_axes(kernel) == {}


@pytest.mark.parametrize("of_tile", [True, False])
def test_blocks_that_an_argument_counts_keep_their_size(of_tile: bool) -> None:
    # `count` is a number of tiles or of elements: only where the kernel divides it by the tile is it one of elements
    def number(b: Builder, count: Value) -> Value:
        known = b.elementwise(Code.FLOORDIV, (count, b.const(BLOCK, "i32", "BLOCK"))) if of_tile else count
        return b.sub(known, b.program_id(0))

    assert axes_of_tiles(rows_from(number)) == ({"BLOCK": frozenset((0,))} if of_tile else {})
