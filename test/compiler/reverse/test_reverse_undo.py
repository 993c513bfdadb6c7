"""Carries that trips add to, or divide, by what the forward stored are found again without a tape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reverse_checks import Forward, gradients_of
from torch import Tensor

from kernel_agent.compiler.planning import Wanted, planned
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.undo import UNDONE
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

N, TRIPS = 8, 5


def delta_rule(*, kept: bool = True, decay: bool = False) -> Kernel:
    """e = v_t - sum(s k_t), s = s + k_t e, y_t = sum(s s). `kept`: e is stored. `decay`: s = s a + k_t e."""
    k = Forward(K="*f32", V="*f32", A="*f32", E="*f32", S="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        (state,) = carries
        key = b.load(k.K, b.add(b.mul(index, b.const(N)), lanes))
        error = b.sub(b.load(k.V, index), b.sum(b.mul(state, key), 0))
        if kept:
            b.store(k.E, index, error)
        state = b.add(b.mul(state, b.load(k.A, b.const(0))) if decay else state, b.mul(key, error))
        b.store(k.Y, index, b.sum(b.mul(state, state), 0))
        return [state]

    start = b.whole(b.const(0.5, "f32"), (N,))
    (last,) = b.loop((b.const(0), k.n, b.const(1)), [start], body, names=["state"])
    b.store(k.S, lanes, last)
    return k.kernel


def steps_of_sinkhorn() -> Kernel:
    """p = p / sum(p * w_t), whose sums are stored."""
    k = Forward(K="*f32", V="*f32", A="*f32", E="*f32", S="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        key = b.load(k.K, b.add(b.mul(index, b.const(N)), lanes))
        total = b.add(b.sum(b.mul(carries[0], b.mul(key, key)), 0), b.const(1.0, "f32"))
        b.store(k.E, index, total)
        found = b.div(carries[0], b.whole(total, (N,)))
        b.store(k.Y, index, b.sum(b.mul(found, found), 0))
        return [found]

    start = b.load(k.V, lanes)
    (last,) = b.loop((b.const(0), k.n, b.const(1)), [start], body, names=["p"])
    b.store(k.S, lanes, last)
    return k.kernel


def keys_that_join(kind: str) -> Kernel:
    """c = sum(keys * k_t) of every key, keys = where(row == t, v, keys - c k_t), y_t = sum(keys keys): keys join one by
    one, and c is stored. Of some kinds, a row that is overwritten was not zero."""
    k = Forward(K="*f32", V="*f32", A="*f32", E="*f32", S="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)
    rows = b.expand(lanes, 1)
    joining = b.expand(b.load(k.V, lanes), 0)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        (keys,) = carries
        key = b.expand(b.load(k.K, b.add(b.mul(index, b.const(N)), lanes)), 0)
        along = b.sum(b.mul(keys, key), 1)
        if kind == "keys see each other":
            along = b.add(along, b.sum(along, 0))
        b.store(k.E, b.add(b.mul(index, b.const(N)), lanes), along)
        moved = b.sub(keys, b.mul(b.expand(along, 1), key))
        turn = b.elementwise(Code.FLOORDIV, (index, b.const(2))) if kind == "rows twice" else index
        keys = b.select(b.compare("ge" if kind == "rows behind" else "eq", rows, turn), joining, moved)
        b.store(k.Y, index, b.sum(b.sum(b.mul(keys, keys), 1), 0))
        return [keys]

    start = b.whole(b.const(0.5 if kind == "no zeros" else 0.0, "f32"), (N, N))
    (last,) = b.loop((b.const(0), k.n, b.const(1)), [start], body, names=["keys"])
    b.store(k.S, b.add(b.mul(rows, b.const(N)), b.expand(lanes, 0)), last)
    return k.kernel


def substitution(kind: str) -> Kernel:
    """rows -= where(row == t, sum(rows k_t), 0), y_t = sum(rows rows): row by row, none of them zero."""
    k = Forward(K="*f32", V="*f32", A="*f32", E="*f32", S="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)
    rows = b.expand(lanes, 1)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        (tile,) = carries
        key = b.expand(b.load(k.K, b.add(b.mul(index, b.const(N)), lanes)), 1)
        turn = b.elementwise(Code.FLOORDIV, (index, b.const(2))) if kind == "rows twice" else index
        here = b.compare("le" if kind == "rows before" else "eq", rows, turn)
        sums = b.whole(b.expand(b.sum(b.mul(tile, key), 0), 0), (N, N))
        if kind == "chosen":
            tile = b.select(here, sums, tile)
        else:
            rest = b.mul(b.const(0.1, "f32"), tile) if kind == "rest" else b.zero(tile)
            tile = b.sub(tile, b.select(here, sums, rest))
        b.store(k.Y, index, b.sum(b.sum(b.mul(tile, tile), 1), 0))
        return [tile]

    start = b.mul(b.expand(b.load(k.V, lanes), 0), b.whole(b.const(1.0, "f32"), (N, N)))
    (last,) = b.loop((b.const(0), k.n, b.const(1)), [start], body, names=["tile"])
    b.store(k.S, b.add(b.mul(rows, b.const(N)), b.expand(lanes, 0)), last)
    return k.kernel


def reflections(kind: str) -> Kernel:
    """rows -= 2 v <v, row> / <v, v> for v = k_t, y_t = sum(rows rows v), and nothing stored."""
    k = Forward(K="*f32", V="*f32", A="*f32", E="*f32", S="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, N)
    rows = b.expand(lanes, 1)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        (tile,) = carries
        vector = b.load(k.K, b.add(b.mul(index, b.const(N)), lanes))
        if kind == "vector of the carry":
            vector = b.add(vector, b.sum(tile, 0))
        other = b.load(k.V, lanes) if kind == "length of another" else vector
        twice = b.const(1.5 if kind == "not twice" else 2.0, "f32")
        factor = b.div(twice, b.sum(b.mul(other, vector), 0))
        along = b.mul(factor, b.sum(b.mul(tile, b.expand(vector, 0)), 1))
        across = b.expand(vector, 1 if kind == "along the other axis" else 0)
        tile = b.sub(tile, b.mul(b.expand(along, 0 if kind == "along the other axis" else 1), across))
        b.store(k.Y, index, b.sum(b.sum(b.mul(b.mul(tile, tile), b.expand(vector, 0)), 1), 0))
        return [tile]

    start = b.mul(b.expand(b.load(k.V, lanes), 0), b.cast(b.add(rows, b.const(1)), "f32"))
    (last,) = b.loop((b.const(0), k.n, b.const(1)), [b.whole(start, (N, N))], body, names=["tile"])
    b.store(k.S, b.add(b.mul(rows, b.const(N)), b.expand(lanes, 0)), last)
    return k.kernel


def check(kernel: Kernel, read: frozenset[str], *, wide: int = 1) -> int:
    """Assert that undone trips give the same gradients; how many tapes are left. `wide`: numbers of E for each trip."""
    saved = prepared(kernel, frozenset({"Y"})).kernel
    seeded = torch.Generator().manual_seed(0)
    shapes = {"K": (TRIPS, N), "V": (N,), "A": (1,)}
    given: dict[str, Tensor | int] = {
        name: torch.randn(shape, dtype=torch.float64, generator=seeded) for name, shape in shapes.items()
    }
    empty = {
        name: torch.full((size,), torch.nan).double()
        for name, size in (("E", TRIPS * wide), ("S", N * wide), ("Y", TRIPS))
    }
    given |= {**empty, "n": TRIPS}
    evaluate(kernel, (1,), given)
    cotangent = {"Y": torch.randn(TRIPS, dtype=torch.float64, generator=seeded)}
    plain = differentiate(kernel, read=read, written=frozenset({"Y"}))
    undone = differentiate(saved, read=read, written=frozenset({"Y"}), undoes=True)
    found, expected = (gradients_of(adjoint, (1,), given, cotangent) for adjoint in (undone, plain))
    for name in read:
        assert expected[name].abs().max() > 1e-3
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)
    assert plain.tapes
    return len(undone.tapes)


@pytest.mark.parametrize("make", [delta_rule, steps_of_sinkhorn], ids=["added", "divided"])
def test_what_trips_add_or_divide_by_is_taken_back(make: Callable[[], Kernel]) -> None:
    assert check(make(), frozenset({"K", "V"})) == 0


def test_rows_that_join_one_by_one_are_zeros_before() -> None:
    assert check(keys_that_join(""), frozenset({"K", "V"}), wide=N) == 0


@pytest.mark.parametrize("kind", ["no zeros", "rows twice", "rows behind", "keys see each other"])
def test_rows_that_were_no_zeros_before_they_are_overwritten_stay_on_the_tape(kind: str) -> None:
    # Rows that start with something, that were chosen before, or that others have changed: what they held is lost.
    assert check(keys_that_join(kind), frozenset({"K", "V"}), wide=N) == 1


@pytest.mark.parametrize("kind", ["subtracted", "chosen"])
def test_a_row_that_is_changed_in_its_own_trip_alone_was_as_the_loop_began_with_it(kind: str) -> None:
    # What the row becomes is made of all rows: taken back by arithmetic, it would have to be known before.
    assert check(substitution(kind), frozenset({"K", "V"}), wide=N) == 0


@pytest.mark.parametrize("kind", ["rows twice", "rows before", "rest"])
def test_rows_that_several_trips_change_stay_on_the_tape(kind: str) -> None:
    # In the second of its trips a row is what the first one made of it.
    assert check(substitution(kind), frozenset({"K", "V"}), wide=N) == 1


def test_reflections_are_done_once_more() -> None:
    # The state that a trip started with lies on no tape, and nothing that the forward stored tells it.
    assert check(reflections(""), frozenset({"K", "V"}), wide=N) == 0


@pytest.mark.parametrize("kind", ["not twice", "length of another", "along the other axis", "vector of the carry"])
def test_what_is_no_reflection_stays_on_the_tape(kind: str) -> None:
    # Done once more, each of these gives something else than it was done to.
    assert check(reflections(kind), frozenset({"K", "V"}), wide=N) == 1


def test_without_stored_numbers_a_carry_stays_on_its_tape() -> None:
    # The error depends on the state it was found with: nobody could compute it before the trip is undone.
    assert check(delta_rule(kept=False), frozenset({"K", "V"})) == 1


def test_a_state_that_decays_stays_on_its_tape() -> None:
    # Undone, small decays would blow rounding errors up.
    assert check(delta_rule(decay=True), frozenset({"K", "V", "A"})) == 1


def test_a_plan_undoes_trips_where_a_tape_would_be_left() -> None:
    wanted = Wanted(delta_rule(), 1, Calls(), frozenset({"K", "V"}), frozenset({"Y"}))
    found = planned("owned", wanted)
    assert UNDONE in found.remarks
    assert not any(buffer.name.startswith(("tape", "segments")) for buffer in found.buffers)


def test_the_plain_plan_does_not_rely_on_what_was_stored() -> None:
    wanted = Wanted(delta_rule(), 1, Calls(), frozenset({"K", "V"}), frozenset({"Y"}))
    assert any(buffer.name.startswith("tape") for buffer in planned("plain", wanted).buffers)
