"""A gradient may start empty only where stores are proved to reach every element there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import triton
from schedule_kernels import add_to, block_of, made, matrix

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.nested import nested
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK = 8


def empty_if(kernel: Kernel, rank: int = 1) -> str:
    return owned(kernel, {"X": "dX"}, Launch.like_forward(rank)).empty_if["dX"]


def holds(expression: str, **names: object) -> bool:
    return bool(eval(expression, {"triton": triton, **names}))


def test_blocks_of_a_vector_cover_it_if_there_are_enough_of_them() -> None:
    def build(b: Builder, x: Value, dx: Value, n: Value) -> None:
        at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", at, n))

    found = empty_if(made("X:*f32 dX:*f32 n", build, BLOCK=BLOCK))
    assert found == "X.numel() == n and BLOCK * grid0 >= n"
    assert holds(found, X=torch.empty(20), n=20, BLOCK=8, grid0=3)
    assert not holds(found, X=torch.empty(20), n=20, BLOCK=8, grid0=2)
    assert not holds(found, X=torch.empty(21), n=20, BLOCK=8, grid0=3)


def rows(masked_by: str) -> Kernel:
    def build(b: Builder, x: Value, dx: Value, stride: Value, n: Value, flag: Value) -> None:
        cols = b.arange(0, BLOCK, "BLOCK")
        mask = b.compare("lt", cols, n)
        if masked_by == "n and the sign of a value":
            mask = b.logical_and(mask, b.compare("lt", b.load(x, cols), b.const(0.0, "f32")))
        elif masked_by == "n or the sign of a value":
            negative = b.compare("lt", b.load(x, cols), b.const(0.0, "f32"))
            mask = b.elementwise(Code.OR, (mask, negative))
        elif masked_by == "n and a lower limit":
            mask = b.logical_and(mask, b.compare("ge", cols, flag))
        elif masked_by == "two limits":
            mask = b.logical_and(mask, b.compare("lt", cols, flag))
        add_to(b, dx, b.add(b.mul(b.program_id(0), stride), cols), b.const(1.0, "f32"), mask)

    return made("X:*f32 dX:*f32 stride N flag", build, BLOCK=BLOCK)


def test_rows_of_one_block_cover_a_matrix_of_as_many_rows_as_programs() -> None:
    # A block is as wide as the mask lets it be, or narrower: a row of 9 in blocks of 8 would miss a column.
    found = empty_if(rows("n"))
    assert holds(found, X=torch.empty(5, 7), N=7, stride=7, grid0=5, BLOCK=8)
    assert not holds(found, X=torch.empty(5, 9), N=9, stride=9, grid0=5, BLOCK=8)
    assert not holds(found, X=torch.empty(6, 7), N=7, stride=7, grid0=5, BLOCK=8)


def test_a_mask_that_is_not_understood_proves_nothing() -> None:
    # Each of these leaves elements out although the columns below N are as many as the tensor has.
    assert empty_if(rows("n and the sign of a value")) == ""


def test_columns_from_a_lower_limit_on_are_fewer_by_that() -> None:
    # Counted as if they began with 0, rows of 7 columns of which 5 are stored to would start empty.
    found = empty_if(rows("n and a lower limit"))
    assert holds(found, X=torch.empty(5, 5), N=7, stride=5, flag=2, grid0=5, BLOCK=8)
    assert not holds(found, X=torch.empty(5, 7), N=7, stride=7, flag=2, grid0=5, BLOCK=8)
    # Without a lane for the last column; with a limit below the first; with one above the last.
    assert not holds(found, X=torch.empty(5, 7), N=9, stride=7, flag=2, grid0=5, BLOCK=8)
    assert not holds(found, X=torch.empty(5, 9), N=7, stride=9, flag=-2, grid0=5, BLOCK=8)
    assert not holds(found, X=torch.empty(0), N=7, stride=7, flag=7, grid0=-5, BLOCK=4)


def test_of_two_limits_the_launch_says_which_is_the_least() -> None:
    found = empty_if(rows("two limits"))
    assert holds(found, X=torch.empty(5, 7), N=7, stride=7, flag=7, grid0=5, BLOCK=8)
    assert not holds(found, X=torch.empty(5, 7), N=7, stride=7, flag=6, grid0=5, BLOCK=8)


def test_where_any_of_two_conditions_is_enough_the_one_that_is_understood_is() -> None:
    # Elements of the other condition alone would lie outside of the tensor, or are counted already.
    found = empty_if(rows("n or the sign of a value"))
    assert holds(found, X=torch.empty(5, 7), N=7, stride=7, grid0=5, BLOCK=8)
    assert not holds(found, X=torch.empty(5, 9), N=7, stride=9, grid0=5, BLOCK=8)


def tiles_of_rows(b: Builder, x: Value, dx: Value, stride: Value, n: Value, tiles: Value) -> None:
    row, tile = (b.elementwise(code, (b.program_id(0), tiles)) for code in (Code.FLOORDIV, Code.REM))
    cols = b.add(b.mul(tile, b.extent(BLOCK)), b.arange(0, BLOCK, "BLOCK"))
    add_to(b, dx, b.add(b.mul(row, stride), cols), b.const(1.0, "f32"), b.compare("lt", cols, n))


def window_of_lanes(b: Builder, x: Value, dx: Value, side: Value) -> None:
    """Lanes are the places of a square, row by row."""
    lane = b.arange(0, BLOCK, "BLOCK")
    row, col = (b.elementwise(code, (lane, side)) for code in (Code.FLOORDIV, Code.REM))
    square = b.mul(side, side)
    at = b.add(b.mul(b.program_id(0), square), b.add(b.mul(row, side), col))
    add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", lane, square))


def test_a_tile_whose_lanes_are_taken_apart_is_as_large_as_the_launch_says() -> None:
    # The kernel was lowered with 8 lanes; a launch with 16 reaches squares of 9, which had zeros before.
    found = empty_if(made("X:*f32 dX:*f32 side", window_of_lanes, BLOCK=BLOCK))
    assert holds(found, X=torch.empty(5, 9), side=3, grid0=5, BLOCK=16)
    assert not holds(found, X=torch.empty(5, 9), side=3, grid0=5, BLOCK=8)


def test_tiles_that_programs_count_row_by_row_cover_whole_rows() -> None:
    found = empty_if(made("X:*f32 dX:*f32 stride N tiles", tiles_of_rows, BLOCK=BLOCK))
    assert holds(found, X=torch.empty(5, 20), N=20, stride=20, tiles=3, grid0=15, BLOCK=8)
    # The last row lacks a tile, or all rows their last columns: as many rows as before, rounded up.
    assert not holds(found, X=torch.empty(5, 20), N=20, stride=20, tiles=3, grid0=14, BLOCK=8)
    assert not holds(found, X=torch.empty(5, 20), N=20, stride=20, tiles=2, grid0=10, BLOCK=8)


def looped(stop_short: bool) -> Kernel:
    def build(b: Builder, x: Value, dx: Value, stride: Value, n: Value, stop: Value) -> None:
        row, lane = b.program_id(0), b.arange(0, BLOCK, "BLOCK")

        def body(off: Value, carries: Sequence[Value]) -> Sequence[Value]:
            cols = b.add(off, lane)
            add_to(b, dx, b.add(b.mul(row, stride), cols), b.const(1.0, "f32"), b.compare("lt", cols, n))
            return []

        b.loop((b.const(0), stop if stop_short else n, b.const(BLOCK, "i32", "BLOCK")), [], body)

    return made("X:*f32 dX:*f32 stride N stop", build, BLOCK=BLOCK)


def test_a_loop_that_ends_where_the_mask_does_covers_the_row() -> None:
    assert empty_if(looped(stop_short=False)) == "X.numel() == N * grid0"


def test_a_loop_that_ends_elsewhere_covers_the_row_only_if_it_goes_on_long_enough() -> None:
    found = empty_if(looped(stop_short=True))
    here = {"X": torch.empty(3, 20), "N": 20, "stride": 20, "grid0": 3, "BLOCK": 8}
    assert holds(found, stop=17, **here)
    assert not holds(found, stop=16, **here)


def test_rows_that_programs_take_in_turn_cover_all_rows() -> None:
    def build(b: Builder, x: Value, dx: Value, stride: Value, count: Value) -> None:
        def body(row: Value, carries: Sequence[Value]) -> Sequence[Value]:
            add_to(b, dx, b.add(b.mul(row, stride), b.arange(0, BLOCK, "BLOCK")), b.const(1.0, "f32"))
            return []

        b.loop((b.program_id(0), count, b.num_programs(0)), [], body)

    found = empty_if(made("X:*f32 dX:*f32 stride rows", build, BLOCK=BLOCK))
    assert found == "X.numel() == BLOCK * rows"


def test_blocks_of_rows_that_programs_take_in_turn_cover_all_rows_if_there_are_enough_blocks() -> None:
    # The loop counts blocks and the mask counts rows: one is enough for the other only if the launch says so.
    def build(b: Builder, x: Value, dx: Value, m: Value, n: Value, count: Value) -> None:
        def body(block: Value, carries: Sequence[Value]) -> Sequence[Value]:
            rows, cols = block_of(b, block, BLOCK, "BM"), b.arange(0, 16, "BN")
            mask = b.logical_and(b.expand(b.compare("lt", rows, m), 1), b.expand(b.compare("lt", cols, n), 0))
            add_to(b, dx, matrix(b, rows, n, cols, b.const(1)), b.const(1.0, "f32"), mask)
            return []

        b.loop((b.program_id(0), count, b.num_programs(0)), [], body)

    found = empty_if(made("X:*f32 dX:*f32 M N blocks", build, BM=BLOCK, BN=16))
    here = {"X": torch.empty(20, 13), "M": 20, "N": 13, "BM": 8, "BN": 16, "grid0": 2}
    assert holds(found, blocks=3, **here)
    assert not holds(found, blocks=2, **here)
    assert not holds(found, blocks=3, **{**here, "BN": 8})


def test_rows_in_steps_that_leave_some_out_prove_nothing() -> None:
    def build(b: Builder, x: Value, dx: Value, stride: Value, count: Value) -> None:
        def body(row: Value, carries: Sequence[Value]) -> Sequence[Value]:
            add_to(b, dx, b.add(b.mul(row, stride), b.arange(0, BLOCK, "BLOCK")), b.const(1.0, "f32"))
            return []

        b.loop((b.program_id(0), count, b.mul(b.num_programs(0), b.const(2))), [], body)

    assert empty_if(made("X:*f32 dX:*f32 stride rows", build, BLOCK=BLOCK)) == ""


def test_rows_that_programs_in_turn_take_in_turn_cover_all_rows() -> None:
    # What a grid of `count` programs did, each every count-th row, a smaller grid does in a loop.
    def build(b: Builder, x: Value, dx: Value, rows: Value, count: Value) -> None:
        def outer(program: Value, _: Sequence[Value]) -> Sequence[Value]:
            def inner(row: Value, _: Sequence[Value]) -> Sequence[Value]:
                at = b.add(b.mul(row, b.const(BLOCK)), b.arange(0, BLOCK, "BLOCK"))
                add_to(b, dx, at, b.const(1.0, "f32"))
                return []

            b.loop((program, rows, count), [], inner)
            return []

        b.loop((b.program_id(0), count, b.num_programs(0)), [], outer)

    kernel = made("X:*f32 dX:*f32 rows count", build, BLOCK=BLOCK)
    launch = replace(Launch.like_forward(1), scalars={"count": Polynomial.symbol("programs", positive=True)})
    found = owned(kernel, {"X": "dX"}, launch).empty_if["dX"]
    assert holds(found, X=torch.empty(5, BLOCK), rows=5, programs=3, grid0=2, BLOCK=BLOCK)
    assert not holds(found, X=torch.empty(6, BLOCK), rows=5, programs=3, grid0=2, BLOCK=BLOCK)


def test_parts_of_rows_that_programs_take_in_turn_cover_all_rows_if_all_have_as_many() -> None:
    # Which row and which part of it are digits of a number that a loop counts: with a part too few, one row lacks it.
    def build(b: Builder, x: Value, dx: Value, count: Value, parts: Value) -> None:
        def body(number: Value, _: Sequence[Value]) -> Sequence[Value]:
            row, part = (b.elementwise(code, (number, parts)) for code in (Code.FLOORDIV, Code.REM))
            start = b.mul(b.add(b.mul(row, parts), part), b.const(BLOCK))
            at = b.add(start, b.arange(0, BLOCK, "BLOCK"))
            add_to(b, dx, at, b.const(1.0, "f32"))
            return []

        b.loop((b.program_id(0), count, b.num_programs(0)), [], body)

    kernel = made("X:*f32 dX:*f32 count parts", build, BLOCK=BLOCK)
    found = empty_if(kernel)
    assert holds(found, X=torch.empty(6 * BLOCK), count=6, parts=3, BLOCK=BLOCK, grid0=2)
    assert not holds(found, X=torch.empty(6 * BLOCK), count=5, parts=3, BLOCK=BLOCK, grid0=2)
    assert not holds(found, X=torch.empty(7 * BLOCK), count=6, parts=3, BLOCK=BLOCK, grid0=2)


def test_tiles_of_a_matrix_cover_it_by_both_axes() -> None:
    def build(b: Builder, x: Value, dx: Value, m: Value, n: Value, sm: Value) -> None:
        rows = block_of(b, b.program_id(0), BLOCK, "BM")
        cols = block_of(b, b.program_id(1), 16, "BN")
        mask = b.logical_and(b.expand(b.compare("lt", rows, m), 1), b.expand(b.compare("lt", cols, n), 0))
        add_to(b, dx, matrix(b, rows, sm, cols, b.const(1)), b.const(1.0, "f32"), mask)

    found = empty_if(made("X:*f32 dX:*f32 M N sm", build, BM=8, BN=16), rank=2)
    here = {"X": torch.empty(20, 30), "M": 20, "N": 30, "BM": 8, "BN": 16}
    assert holds(found, grid0=3, grid1=2, **here)
    assert not holds(found, grid0=3, grid1=1, **here)
    assert not holds(found, grid0=2, grid1=2, **here)


def test_the_axes_that_are_stored_along_are_those_of_the_address() -> None:
    # Two axes bounded by masks, and heads of the grid between them: a slice of a tensor has just these, or others.
    def build(b: Builder, x: Value, dx: Value, m: Value, n: Value, stride: Value) -> None:
        rows, cols = block_of(b, b.program_id(0), BLOCK, "BM"), b.arange(0, 4, "BN")
        inside = b.logical_and(b.expand(b.compare("lt", rows, m), 1), b.expand(b.compare("lt", cols, n), 0))
        at = b.add(matrix(b, rows, stride, cols, b.const(1)), b.mul(b.program_id(1), n))
        add_to(b, dx, at, b.const(1.0, "f32"), inside)

    kernel = made("X:*f32 dX:*f32 M N stride", build, BM=BLOCK, BN=4)
    found = owned(kernel, {"X": "dX"}, Launch.like_forward(2)).axes["dX"]
    assert {(axis.stride, axis.size) for axis in found} == {("stride", "M"), ("1", "N"), ("N", "grid1")}


def test_the_axes_of_an_address_that_does_not_start_at_the_first_element_are_not_known() -> None:
    # As many elements as the tensor has, but not those: one would be left out.
    def build(b: Builder, x: Value, dx: Value, n: Value) -> None:
        at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        add_to(b, dx, b.add(at, b.const(1)), b.const(1.0, "f32"), b.compare("lt", at, n))

    found = owned(made("X:*f32 dX:*f32 n", build, BLOCK=BLOCK), {"X": "dX"}, Launch.like_forward(1))
    assert found.axes["dX"] == ()


def rows_of_programs() -> Kernel:
    """Programs of `each` rows, in blocks; a block may end beyond the program's rows, the last program's beyond M."""

    def build(b: Builder, x: Value, dx: Value, rows: Value, each: Value) -> None:
        def body(index: Value, _: list[Value]) -> list[Value]:
            own = b.add(index, b.arange(0, BLOCK, "BLOCK"))
            row = b.add(b.mul(b.program_id(0), each), own)
            mask = b.logical_and(b.compare("lt", own, each), b.compare("lt", row, rows))
            add_to(b, dx, row, b.const(1.0, "f32"), mask)
            return []

        b.loop((b.const(0), each, b.extent(BLOCK)), [], body)

    return made("X:*f32 dX:*f32 M each", build, BLOCK=BLOCK)


def test_rows_that_programs_share_out_are_covered_where_they_are_enough() -> None:
    found = empty_if(rows_of_programs())
    assert holds(found, X=torch.empty(100), M=100, each=12, grid0=9, BLOCK=8)
    assert not holds(found, X=torch.empty(100), M=100, each=12, grid0=8, BLOCK=8)
    assert not holds(found, X=torch.empty(100), M=96, each=12, grid0=9, BLOCK=8)
    # A product of two negative numbers is no number of rows.
    assert not holds(found, X=torch.empty(100), M=100, each=-12, grid0=9, BLOCK=8)


def planes_of_tiles() -> Kernel:
    """Of one axis of the grid: planes of `tiles` tiles, `tiles_w` of them in a row of a plane."""

    def build(b: Builder, x: Value, dx: Value, rows: Value, cols: Value, tiles: Value, across: Value) -> None:
        tile = b.program_id(0)
        plane, rest = (b.elementwise(code, (tile, tiles)) for code in (Code.FLOORDIV, Code.REM))
        row = block_of(b, b.elementwise(Code.FLOORDIV, (rest, across)), BLOCK, "BLOCK")
        col = block_of(b, b.elementwise(Code.REM, (tile, across)), BLOCK, "BLOCK")
        mask = b.logical_and(b.expand(b.compare("lt", row, rows), 1), b.expand(b.compare("lt", col, cols), 0))
        at = b.add(b.mul(plane, b.mul(rows, cols)), matrix(b, row, cols, col, b.const(1)))
        add_to(b, dx, at, b.const(1.0, "f32"), mask)

    return made("X:*f32 dX:*f32 M N tiles tiles_w", build, BLOCK=BLOCK)


@pytest.mark.parametrize(("tiles", "expected"), [(6, True), (7, False)])
def test_tiles_of_planes_are_digits_where_the_tiles_of_a_plane_are_whole_rows(tiles: int, *, expected: bool) -> None:
    # With 7 tiles of a plane, 3 in a row, the eighth program has the column of the second but the next plane's row.
    seen = {"X": torch.empty(2, 16, 24), "M": 16, "N": 24, "tiles": tiles, "tiles_w": 3, "grid0": 2 * tiles}
    launch = Launch.like_forward(1, Calls(({**seen, "BLOCK": BLOCK, "triton": triton},)))
    found = nested(planes_of_tiles(), launch)
    assert found.facts == (("(tiles) % (tiles_w) == 0",) if expected else ())
    stores = owned(found.kernel, {"X": "dX"}, launch).empty_if
    assert bool(stores) is expected
    if expected:
        given = {**seen, "BLOCK": BLOCK}
        assert holds(stores["dX"], **given)
        assert not holds(stores["dX"], **{**given, "grid0": 11})
        assert not holds(stores["dX"], **{**given, "tiles_w": 2, "tiles": 4})


def segments(length: int) -> Kernel:
    """Segments of two segments of four trips each, of which `length` trips are made."""

    def build(b: Builder, x: Value, dx: Value, n: Value) -> None:
        trips, each = b.setting("SEGMENT", 4), b.setting("SEGMENTS", 2)
        both = b.mul(trips, each)
        made_of = b.add(both, b.const(length - 8))

        def outer(first: Value, _: list[Value]) -> list[Value]:
            end = b.elementwise(Code.MIN, (n, b.add(first, made_of)))

            def inner(start: Value, _: list[Value]) -> list[Value]:
                last = b.elementwise(Code.MIN, (end, b.add(start, trips)))

                def trip(at: Value, _: list[Value]) -> list[Value]:
                    add_to(b, dx, at, b.const(1.0, "f32"))
                    return []

                b.loop((start, last, b.const(1)), [], trip)
                return []

            b.loop((first, end, trips), [], inner)
            return []

        b.loop((b.const(0), n, both), [], outer)

    return made("X:*f32 dX:*f32 n", build)


def test_trips_of_segments_of_segments_are_all_trips() -> None:
    assert empty_if(segments(8)) == "X.numel() == n"
    assert empty_if(segments(7)) == ""
    assert empty_if(segments(4)) == ""
