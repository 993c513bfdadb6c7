"""What kernels do to memory: what is stored and read again, overwritten, and added to; and what is refused."""

from __future__ import annotations

import pytest
import torch
from reverse_checks import Forward, compare
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.plain import plain
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

N = 8


class Written(Forward):
    """A kernel that reads what it writes to."""

    def __init__(self, *written: str, **arguments: str) -> None:
        super().__init__(**arguments)
        self.b = Builder(self.kernel, frozenset(self.arguments[name] for name in written))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def derive(kernel: Kernel) -> None:
    differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}))


def test_a_value_that_is_stored_and_read_again_passes_on_both_cotangents() -> None:
    k = Written("Y", X="*f32", Y="*f32", Z="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)
    mask = b.compare("lt", lanes, k.n)
    x = b.load(k.X, lanes, mask, b.const(0.0, "f32"))
    b.store(k.Y, lanes, b.unary(Code.EXP, x), mask)
    again = b.load(k.Y, lanes, mask, b.const(0.0, "f32"))
    b.store(k.Z, lanes, b.mul(again, x), mask)
    compare(k.kernel, {"X": numbers(5)}, {"Y": (5,), "Z": (5,)}, lambda x: (x.exp(), x.exp() * x), integers={"n": 5})


def test_a_store_that_is_overwritten_counts_for_what_read_it_only() -> None:
    k = Written("Y", X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    x = b.load(k.X, lanes)
    b.store(k.Y, lanes, b.unary(Code.SIN, x))
    again = b.load(k.Y, lanes)
    b.store(k.Y, lanes, b.mul(again, again))
    compare(k.kernel, {"X": numbers(N)}, {"Y": (N,)}, lambda x: x.sin() ** 2)


def test_reading_what_other_lanes_may_have_written_is_refused() -> None:
    k = Written("Y", X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    b.store(k.Y, lanes, b.load(k.X, lanes))
    shifted = b.load(k.Y, b.sub(b.const(N - 1), lanes))
    b.store(k.Y, b.add(lanes, b.const(N)), shifted)
    with pytest.raises(CannotDerive, match="written and read again"):
        derive(k.kernel)


def test_a_load_in_a_loop_that_stores_later_is_refused() -> None:
    # the second trip reads what the first one wrote, which is not what stands before the load in the source
    k = Written("Y", X="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        y = b.load(k.Y, b.add(b.mul(index, b.const(N)), lanes))
        b.store(k.Y, b.add(b.mul(b.add(index, b.const(1)), b.const(N)), lanes), b.mul(y, b.load(k.X, lanes)))
        return []

    b.loop((b.const(0), k.n, b.const(1)), [], body)
    with pytest.raises(CannotDerive, match="written and read again"):
        derive(k.kernel)


def test_an_input_that_is_overwritten_is_refused_where_its_value_is_needed() -> None:
    k = Written("X", X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    x = b.load(k.X, lanes)
    b.store(k.Y, lanes, b.mul(x, x))
    b.store(k.X, lanes, b.const(0.0, "f32"))
    with pytest.raises(CannotDerive, match="the gradient needs what it held"):
        derive(k.kernel)


def test_an_input_that_is_overwritten_is_allowed_where_nothing_needs_its_value() -> None:
    k = Written("X", X="*f32", W="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    x = b.load(k.X, lanes)
    b.store(k.Y, lanes, b.mul(x, b.load(k.W, lanes)))
    b.store(k.X, lanes, b.const(0.0, "f32"))
    adjoint = differentiate(k.kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    assert all(op.base.name != "X" for op in adjoint.kernel.ops if op.code is Code.LOAD)


def test_an_argument_that_is_input_and_output_is_refused() -> None:
    k = Written("X", X="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    b.store(k.X, lanes, b.mul(b.load(k.X, lanes), b.const(2.0, "f32")))
    with pytest.raises(CannotDerive, match="write the result to a tensor of its own"):
        differentiate(k.kernel, read=frozenset({"X"}), written=frozenset({"X"}))


@pytest.mark.parametrize("n", [0, 3, N])
def test_of_stores_that_meet_the_last_takes_the_cotangent(n: int) -> None:
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)
    x = b.load(k.X, lanes)
    b.store(k.Y, lanes, b.unary(Code.EXP, x))
    b.store(k.Y, b.add(lanes, k.n), b.mul(x, x))
    b.store(k.Y, b.const(2), b.const(5.0, "f32"))  # what depends on no input overwrites, too

    def reference(x: Tensor) -> Tensor:
        y = torch.cat([x.exp()[:n], x * x])
        return torch.cat([y[:2], torch.tensor([5.0]).double(), y[3:]])

    adjoint = compare(k.kernel, {"X": numbers(N)}, {"Y": (N + n,)}, reference, integers={"n": n})
    assert adjoint.consumed == ("dY",)


def test_stores_next_to_each_other_and_in_turns_do_not_meet() -> None:
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)
    low = b.compare("lt", lanes, k.n)
    x = b.load(k.X, lanes, low, b.const(0.0, "f32"))
    b.store(k.Y, lanes, x, low)  # n lanes from 0
    b.store(k.Y, b.add(lanes, k.n), b.mul(x, x), low)  # n lanes from n
    turns = b.mul(lanes, b.const(2))
    compare(k.kernel, {"X": numbers(5)}, {"Y": (10,)}, lambda x: torch.cat([x, x * x]), integers={"n": 5})

    k = Forward(X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    x, turns = b.load(k.X, lanes), b.mul(lanes, b.const(2))
    b.store(k.Y, turns, x)
    b.store(k.Y, b.add(turns, b.const(1)), b.mul(x, x))
    compare(k.kernel, {"X": numbers(N)}, {"Y": (N, 2)}, lambda x: torch.stack([x, x * x], 1))


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


def test_of_trips_that_store_to_the_same_place_the_last_takes_the_cotangent() -> None:
    # 8 lanes from 8 * trip, and 8 more from 8 * (trip + 1): the next trip overwrites the second
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)
    x = b.load(k.X, lanes)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        at = b.add(b.mul(index, b.const(N)), lanes)
        b.store(k.Y, at, x)
        b.store(k.Y, b.add(at, b.const(N)), b.mul(x, x))
        return []

    b.loop((b.const(0), k.n, b.const(1)), [], body)
    adjoint = compare(
        k.kernel, {"X": numbers(N)}, {"Y": (4, N)}, lambda x: torch.stack([x, x, x, x * x]), integers={"n": 3}
    )
    assert adjoint.consumed == ("dY",)


def test_a_loop_that_stores_to_the_same_place_leaves_its_last_trip() -> None:
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        x = b.load(k.X, b.add(b.mul(index, b.const(N)), lanes))
        b.store(k.Y, lanes, b.mul(x, x))
        return []

    b.loop((b.const(0), k.n, b.const(1)), [], body)
    compare(k.kernel, {"X": numbers(3, N)}, {"Y": (N,)}, lambda x: x[2] ** 2, integers={"n": 3})


def test_a_store_that_all_programs_of_an_axis_make_is_refused() -> None:
    k = Forward(X="*f32", Y="*f32", Z="*f32")
    b, at = k.b, k.rows(N)
    x = b.load(k.X, at)
    b.store(k.Z, b.add(at, b.program_id(1)), x)
    b.store(k.Y, at, b.mul(x, x))
    with pytest.raises(CannotDerive, match="axis 1 of the grid store to the same elements of Y"):
        derive(k.kernel)


def test_branches_store_to_the_same_place_without_meeting() -> None:
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, at = k.b, k.rows(N)
    x = b.load(k.X, at)

    def squared() -> list[Value]:
        b.store(k.Y, at, b.mul(x, x))
        return []

    def as_it_is() -> list[Value]:
        b.store(k.Y, at, x)
        return []

    b.branch(b.compare("lt", b.program_id(0), k.n), squared, as_it_is)
    reference = lambda x: torch.cat([x[:1] ** 2, x[1:]])  # noqa: E731
    compare(k.kernel, {"X": numbers(2, N)}, {"Y": (2, N)}, reference, grid=(2,), integers={"n": 1})


def test_sums_and_stores_to_one_output_are_refused() -> None:
    k = Forward(X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    x = b.load(k.X, lanes)
    b.store(k.Y, lanes, x)
    b.store(k.Y, lanes, x, code=Code.ATOMIC_ADD)
    with pytest.raises(CannotDerive, match="both stored to and added to"):
        derive(k.kernel)


def test_bits_of_an_input_that_become_a_float_are_refused() -> None:
    k = Forward(X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    bits = b.elementwise(Code.BITCAST, (b.load(k.X, lanes),), "i32")
    b.store(k.Y, lanes, b.elementwise(Code.BITCAST, (b.elementwise(Code.XOR, (bits, b.const(1))),), "f32"))
    with pytest.raises(CannotDerive, match="made of bits"):
        derive(k.kernel)


def test_integers_are_refused_as_inputs() -> None:
    k = Forward(X="*i32", Y="*f32")
    with pytest.raises(CannotDerive, match="holds i32"):
        derive(k.kernel)
