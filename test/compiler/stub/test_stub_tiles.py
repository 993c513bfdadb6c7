"""A launch of a backward takes another tile only where all that counts tiles follows."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.tiles import axes_of_tiles, retiled, tiles_of_axes, tiles_of_bounds

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


def test_what_bounds_positions_tells_which_of_two_equal_numbers_is_which_tile() -> None:
    # both tiles are 128 in the launch, and programs of both are along one axis
    out, *sizes = (Value("*f32", (), "Out"), Value("i32", (), "M"), Value("i32", (), "N"))
    kernel = Kernel("tiles", [out, *sizes], extents={16: "BM", 32: "BN"}, constants={"BM": 16, "BN": 32})
    b = Builder(kernel, frozenset((out,)))
    masks, offsets = [], []
    codes = (Code.FLOORDIV, Code.REM)
    for axis, (code, size, (tile, symbol)) in enumerate(zip(codes, sizes, ((16, "BM"), (32, "BN")), strict=True)):
        number = b.elementwise(code, (b.program_id(0), b.const(3)))
        at = b.expand(b.add(b.mul(number, b.const(tile, "i32", symbol)), b.arange(0, tile, symbol)), 1 - axis)
        masks.append(b.compare("lt", at, size))
        offsets.append(at)
    place = b.add(b.mul(offsets[0], sizes[1]), offsets[1])
    b.store(out, place, b.whole(b.const(0.0, "f32"), (16, 32)), b.logical_and(*masks))
    assert tiles_of_bounds(kernel) == {"M": "BM", "N": "BN"}

    grid, rows, cols, size = (
        ast.parse(text, mode="eval").body
        for text in ("triton.cdiv(rows, 128) * triton.cdiv(cols, 128)", "rows", "cols", "128")
    )
    given, tiles = {"BM": size, "BN": size}, {"BM": "BLOCK_M", "BN": "BLOCK_N"}
    shown = ast.unparse(retiled(grid, None, given, tiles, {"BM": rows, "BN": cols}))
    assert shown == "triton.cdiv(rows, BLOCK_M) * triton.cdiv(cols, BLOCK_N)"
