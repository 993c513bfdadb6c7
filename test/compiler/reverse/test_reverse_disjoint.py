"""Which stores are known not to meet: of others, the cotangent is cloned, and zeros are stored to it."""

from __future__ import annotations

import pytest
from reverse_checks import Forward

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.plain import plain
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

N = 8


def heads_in_halves(distance: str) -> Kernel:
    """Four rows of 2 HALF numbers, HALF lanes of each stored `distance` apart."""
    k = Forward(X="*f32", Y="*f32")
    k.kernel.constants |= {"HALF": 3}
    b = k.b
    rows, lanes, half = b.expand(b.arange(0, 4), 1), b.expand(b.arange(0, 4), 0), b.const(3, "i32", "HALF")
    at = b.add(b.mul(rows, b.const(6, "i32", "2 * HALF")), lanes)
    low = b.logical_and(b.compare("lt", lanes, half), b.compare("lt", rows, b.const(4)))
    x = b.load(k.X, at, low, b.const(0.0, "f32"))
    b.store(k.Y, at, x, low)
    b.store(k.Y, b.add(at, b.const({"HALF": 3, "2 * HALF": 6, "2": 2}[distance], "i32", distance)), b.mul(x, x), low)
    return k.kernel


def test_halves_of_several_rows_do_not_meet() -> None:
    adjoint = differentiate(heads_in_halves("HALF"), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert adjoint.consumed == ()


@pytest.mark.parametrize("distance", ["2 * HALF", "2"])
def test_parts_of_several_rows_that_reach_into_each_other_meet(distance: str) -> None:
    # A row farther, the second store is where the first one was for the next row; two lanes farther, within the row.
    adjoint = differentiate(heads_in_halves(distance), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert adjoint.consumed == ("dY",)


def by_the_program(kind: str) -> Kernel:
    """Two stores of a program, the first of which moves twice as far from program to program."""
    k = Forward(X="*f32", Y="*f32")
    b, lanes, program = k.b, k.b.arange(0, 4), k.b.program_id(0)
    x = b.load(k.X, lanes)
    step, distance = (b.const(2), b.const(1)) if kind == "in turns" else (b.const(1), b.const(4))
    b.store(k.Y, b.add(b.mul(lanes, step), b.mul(program, b.const(2))), x)
    b.store(k.Y, b.add(b.mul(lanes, step), b.add(program, distance)), b.mul(x, x))
    return k.kernel


@pytest.mark.parametrize("kind", ["in turns", "side by side"])
def test_stores_that_move_at_two_paces_from_program_to_program_may_meet(kind: str) -> None:
    # They are apart in program 0: in the one whose number is the distance they are the same elements.
    adjoint = differentiate(by_the_program(kind), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert adjoint.consumed == ("dY",)


def encoding(first: int, width: int) -> Kernel:
    """Rows of `width`: three numbers, and from column `first` on twice six of them, in turns of three."""
    k = Forward(X="*f32", Y="*f32")
    b = k.b
    rows, lanes, three = b.expand(b.arange(0, 4), 1), b.expand(b.arange(0, 16), 0), b.const(3)
    there = b.compare("lt", lanes, b.const(12))
    row, place = b.mul(rows, b.const(width)), b.elementwise(Code.REM, (lanes, three))
    x = b.load(k.X, b.add(b.mul(rows, three), place), there, b.const(0.0, "f32"))
    column = b.add(b.mul(b.elementwise(Code.FLOORDIV, (lanes, three)), b.const(6)), place)
    for half in (0, 3):
        at = b.add(row, b.add(column, b.const(first + half)))
        b.store(k.Y, at, b.unary(Code.SIN, b.mul(x, b.const(1.0 + half, "f32"))), there)
    b.store(k.Y, b.add(row, lanes), x, b.logical_and(there, b.compare("lt", lanes, three)))
    return k.kernel


def test_columns_of_several_indices_do_not_meet_those_of_one() -> None:
    adjoint = differentiate(encoding(3, 27), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert adjoint.consumed == ()


@pytest.mark.parametrize(("first", "width"), [(2, 27), (3, 26)])
def test_columns_that_reach_into_others_may_meet_them(first: int, width: int) -> None:
    # A column to the left, the first sine is the third number; in rows too short, the last one is the next row's first.
    adjoint = differentiate(encoding(first, width), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert adjoint.consumed == ("dY",)


def row_with_a_tail(tail: str) -> Kernel:
    """Exponentials of r + 1 numbers of row r, in tiles of TILE lanes, and zeros from `tail` to `size`."""
    k = Forward(X="*f32", Y="*f32", size="i32")
    k.kernel.constants |= {"TILE": N}
    b, one = k.b, k.b.const(1)
    lanes, tile, live = b.arange(0, N, symbol="TILE"), b.const(N, "i32", "TILE"), b.add(b.program_id(0), one)
    row = b.mul(b.program_id(0), k.size)

    def exponentials(start: Value, carries: list[Value]) -> list[Value]:
        at = b.add(start, lanes)
        there = b.compare("lt", at, k.size)
        x = b.load(k.X, b.add(row, at), there, b.const(0.0, "f32"))
        b.store(k.Y, b.add(row, at), b.unary(Code.EXP, x), there)
        return []

    def zeros(start: Value, carries: list[Value]) -> list[Value]:
        at = b.add(start, lanes)
        b.store(k.Y, b.add(row, at), b.const(0.0, "f32"), b.compare("lt", at, k.size))
        return []

    b.loop((b.const(0), live, tile), [], exponentials)
    tiles = b.elementwise(Code.FLOORDIV, (b.sub(b.add(live, tile), one), tile))
    starts = {
        "behind the last tile": b.mul(tiles, tile),
        "in the last tile": live,
        "a lane before": b.sub(b.mul(tiles, tile), one),
    }
    b.loop((starts[tail], k.size, tile), [], zeros)
    return k.kernel


def test_a_tail_that_begins_behind_the_last_tile_of_a_loop_does_not_meet_it() -> None:
    # Unless that is proved, the cotangent is copied, zeros are written to it, and no schedule but `plain` is had.
    adjoint = differentiate(row_with_a_tail("behind the last tile"), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert adjoint.consumed == ()


@pytest.mark.parametrize("tail", ["in the last tile", "a lane before"])
def test_a_tail_that_begins_before_a_loop_has_ended_may_meet_it(tail: str) -> None:
    # Masks do not say where a tile ends: what the tail overwrites has no cotangent.
    adjoint = differentiate(row_with_a_tail(tail), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert adjoint.consumed == ("dY",)


def columns_in_planes(distance: str) -> Kernel:
    """Columns of each program, bounded by `n` over all programs, and their squares `distance` behind them."""
    k = Forward(X="*f32", Y="*f32", n="i32", size="i32")
    b = k.b
    cols = b.add(b.mul(b.program_id(0), b.const(4)), b.arange(0, 4))
    mask = b.compare("lt", cols, k.n)
    x = b.load(k.X, cols, mask, b.const(0.0, "f32"))
    b.store(k.Y, cols, x, mask)
    b.store(k.Y, b.add(cols, k.arguments[distance]), b.mul(x, x), mask)
    return k.kernel


def test_planes_as_wide_as_a_mask_of_all_programs_do_not_meet() -> None:
    # A tile of four columns may be wider than the plane: only with the programs' numbers does the mask tell.
    adjoint = differentiate(columns_in_planes("n"), read=frozenset({"X"}), written=frozenset({"Y"}))
    assert (adjoint.consumed, adjoint.facts) == ((), ())


@pytest.mark.parametrize(
    ("sizes", "facts"), [((5, 6), ("size >= n",)), ((5, 3), None), (None, None)], ids=["apart", "meet", "no call"]
)
def test_planes_of_a_size_that_was_given_are_apart_where_all_calls_show_it(
    sizes: tuple[int, int] | None, facts: tuple[str, ...] | None
) -> None:
    # Without the fact in the plan, a call with smaller planes would get gradients of what was overwritten.
    calls = None if sizes is None else Calls(({"n": sizes[0], "size": sizes[1], "grid0": 2},))
    kernel = columns_in_planes("size")
    adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}), calls=calls)
    assert adjoint.consumed == (("dY",) if facts is None else ())
    assert adjoint.facts == (facts or ())
    assert [fact.expression for fact in plain(kernel, adjoint).facts] == list(facts or ())


def turned_planes(planes: int) -> Kernel:
    """A tile of a plane of `n` rows, and the same tile of one `planes` behind it, whose columns lie side by side."""
    k = Forward(X="*f32", Y="*f32", n="i32", m="i32")
    b, at = k.b, [k.b.add(k.b.mul(k.b.program_id(axis), k.b.const(4)), k.b.arange(0, 4)) for axis in (0, 1)]
    rows, cols = b.expand(at[0], 1), b.expand(at[1], 0)
    mask = b.logical_and(b.expand(b.compare("lt", at[0], k.n), 1), b.expand(b.compare("lt", at[1], k.m), 0))
    place = b.add(b.mul(rows, k.m), cols)
    x = b.load(k.X, place, mask, b.const(0.0, "f32"))
    b.store(k.Y, place, x, mask)
    plane = b.mul(b.mul(k.n, k.m), b.const(planes))
    b.store(k.Y, b.add(plane, b.add(b.mul(cols, k.n), rows)), b.mul(x, x), mask)
    return k.kernel


@pytest.mark.parametrize(("planes", "facts"), [(2, ("m * n >= 0",)), (0, None)], ids=["apart", "one plane"])
def test_a_plane_and_one_with_its_columns_side_by_side_are_apart_where_calls_show_it(
    planes: int, facts: tuple[str, ...] | None
) -> None:
    # The calls were not asked: the cotangent was cloned, and zeros stored to it.
    calls = Calls(({"n": 5, "m": 7, "grid0": 2, "grid1": 2},))
    adjoint = differentiate(turned_planes(planes), read=frozenset({"X"}), written=frozenset({"Y"}), calls=calls)
    assert (adjoint.consumed, adjoint.facts) == (("dY",) if facts is None else (), facts or ())
