"""Recurrences in segments: the same gradients from tapes of a segment instead of tapes of all trips."""

from __future__ import annotations

import math

import pytest
import torch
from reverse_checks import Forward, gradients_of
from torch import Tensor

from kernel_agent.compiler.planning import Wanted, planned
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.checkpoints import Checkpointed, checkpointed
from kernel_agent.compiler.reverse.tapes import lower_tapes
from kernel_agent.compiler.schedule.calls import Calls, Entry
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

N = 8
PROGRAMS = 2


def recurrence(loads: int = 1) -> Kernel:
    """Programs of one row each: h = tanh(h * sum of `loads` tiles x[pid, t]) for t below n; Y[pid, t] = h."""
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, pid, lanes = k.b, k.b.program_id(0), k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        at = b.add(b.mul(b.add(b.mul(pid, k.n), index), b.const(N)), lanes)
        x = b.load(k.X, at)
        for place in range(1, loads):
            x = b.add(x, b.load(k.X, b.mul(at, b.const(place + 1)), b.compare("lt", at, b.const(0)), b.zero(x)))
        h = b.unary(Code.TANH, b.mul(carries[0], x))
        b.store(k.Y, at, h)
        return [h]

    b.loop((b.const(0), k.n, b.const(1)), [b.whole(b.const(0.5, "f32"), (N,))], body, names=["h"])
    return k.kernel


def light(step: int = 1) -> Kernel:
    """Programs of one row each: h = tanh(h * x[pid, t, 0]) for every `step`th t below n; Y[pid, t] = h."""
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, pid, lanes = k.b, k.b.program_id(0), k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        at = b.mul(b.add(b.mul(pid, k.n), index), b.const(N))
        h = b.unary(Code.TANH, b.mul(carries[0], b.load(k.X, at)))
        b.store(k.Y, b.add(at, lanes), h)
        return [h]

    starts = [b.cast(b.add(lanes, b.const(1)), "f32")]
    b.loop((b.const(0), k.n, b.const(step)), starts, body, names=["h"])
    return k.kernel


def cut(kernel: Kernel, trips: int) -> Checkpointed | None:
    adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    return checkpointed(kernel, adjoint, Calls(({"n": trips},)))


def tensors(trips: int) -> dict[str, Tensor | int]:
    x = torch.randn(PROGRAMS, trips, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"X": x, "Y": torch.full_like(x, torch.nan), "n": trips}


@pytest.mark.parametrize("trips", [16, 13, 3, 1])
def test_segments_change_no_result_and_no_gradient(trips: int) -> None:
    # Segments have four trips here: 16 are whole segments, 13 end with a short one, 3 and 1 are less than one.
    found = cut(recurrence(), 16)
    assert found is not None
    same(recurrence(), found, trips)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("trips", [32, 27, 16, 5, 1])
def test_segments_of_segments_change_no_result_and_no_gradient(trips: int, step: int) -> None:
    # Four segments of four trips each are one of the longer ones here.
    found = cut(light(step), 600 * step)
    assert found is not None
    assert list(found.settings) == ["SEGMENT", "SEGMENTS"]
    same(light(step), found, trips * step)


def same(whole: Kernel, found: Checkpointed, trips: int) -> None:
    """Assert that both compute the same, and have the same gradients."""
    given = tensors(trips)
    cotangent = {"Y": torch.randn_like(given["X"])}  # type: ignore[arg-type]
    results, gradients = [], []
    for kernel in (whole, found.kernel):
        arguments = {name: one.clone() if isinstance(one, Tensor) else one for name, one in given.items()}
        evaluate(kernel, (PROGRAMS,), arguments)
        adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
        results.append(arguments["Y"])
        gradients.append(gradients_of(adjoint, (PROGRAMS,), arguments, cotangent)["X"])
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_tapes_grow_with_the_root_of_the_trips() -> None:
    # The tape of all trips has one tile for each: 1024 of them.
    found = cut(recurrence(), 1024)
    assert found is not None
    (setting,) = found.settings
    known = {"n": 1024, setting: 32, "grid0": 1, "grid1": 1, "grid2": 1, "max": max, "min": min, "int": int}
    adjoint = differentiate(found.kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    buffers = lower_tapes(adjoint.kernel).buffers
    sizes = {one.name: math.prod(eval(text, {}, known) for text in one.shape) for one in buffers}
    assert sizes == {"segments_h": 32 * N, "tape_h": 32 * N}


@pytest.mark.parametrize("step", [1, 3])
def test_tapes_of_a_light_loop_grow_with_the_cube_root_of_its_trips(step: int) -> None:
    # With one level there would be 24 tiles each of segments and of their trips, more than the trips load.
    found = cut(light(step), 600 * step)
    assert found is not None
    known = {"n": 600 * step, "grid0": 1, "grid1": 1, "grid2": 1, "max": max, "min": min, "int": int}
    known |= dict.fromkeys(found.settings, 8)
    adjoint = differentiate(found.kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    buffers = lower_tapes(adjoint.kernel).buffers
    sizes = [math.prod(eval(text, {}, known) for text in one.shape) for one in buffers]
    assert sizes == [10 * N, 8 * N, 8 * N]


def test_loops_of_few_trips_or_many_loads_have_segments_alone() -> None:
    # A third run of the forward would spare little.
    few, heavy = cut(light(), 500), cut(recurrence(), 600)
    assert few is not None
    assert heavy is not None
    assert list(few.settings) == list(heavy.settings) == ["SEGMENT"]


def test_the_setting_is_the_root_of_the_trips() -> None:
    class Rounding:
        @staticmethod
        def next_power_of_2(number: int) -> int:
            return 1 << (number - 1).bit_length()

    found = cut(recurrence(), 1024)
    assert found is not None
    (text,) = found.settings.values()
    sizes = [eval(text, {"triton": Rounding, "n": trips, "max": max, "int": int}) for trips in (0, 1, 17, 1024)]
    assert sizes == [1, 1, 4, 32]


def test_outputs_that_are_overwritten_later_do_not_lengthen_tapes() -> None:
    # What the forward stored is lost then, but segments need none of it.
    wanted = Wanted(recurrence(), 1, Calls(({"n": 1024},)), frozenset({"X"}), frozenset({"Y"}), lost=frozenset({"Y"}))
    plan = planned("owned", wanted)
    assert {"segments_h", "tape_h"} <= {one.name for one in plan.buffers}
    assert "Y" not in {value.name for step in plan.steps for value in step.kernel.arguments}


def test_short_loops_keep_their_tapes() -> None:
    # Segments of three trips would need as many tiles as five trips, for twice the work.
    assert cut(recurrence(), 5) is None


@pytest.mark.parametrize(("asked", "is_cut"), [(64, True), (6, False)])
def test_loops_that_are_long_at_sizes_of_real_work_are_cut(asked: int, is_cut: bool) -> None:
    # Sizes that are small enough to be looked at make few trips, and each trip of real work had its place on the tape.
    kernel = recurrence()
    adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    calls = Calls(({"n": 4},), entries=(Entry({"steps": 4}, {"steps": asked}),))
    assert (checkpointed(kernel, adjoint, calls) is not None) == is_cut


def test_a_loop_as_long_as_a_tensor_says_is_cut_where_that_is_long() -> None:
    # The longest of several lengths is one number, but the tensor that has them is none.
    k = Forward(X="*f32", Y="*f32", Lengths="*i32")
    b, pid, lanes = k.b, k.b.program_id(0), k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        at = b.add(b.mul(index, b.const(N)), lanes)
        h = b.unary(Code.TANH, b.mul(carries[0], b.load(k.X, at)))
        b.store(k.Y, at, h)
        return [h]

    start = b.whole(b.const(0.5, "f32"), (N,))
    b.loop((b.const(0), b.load(k.Lengths, pid), b.const(1)), [start], body, names=["h"])
    adjoint = differentiate(k.kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    for longest, is_cut in ((64, True), (5, False)):
        calls = Calls(({"Lengths": torch.tensor([3, longest])},), entries=(Entry({"S": 3}, {"S": 3}),))
        assert (checkpointed(k.kernel, adjoint, calls) is not None) == is_cut


def test_loops_of_unknown_length_keep_their_tapes() -> None:
    kernel = recurrence()
    adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    assert checkpointed(kernel, adjoint, Calls()) is None


def test_a_tape_that_is_small_beside_what_a_trip_loads_stays() -> None:
    # A second forward would load nine tiles again to spare one.
    assert cut(recurrence(loads=9), 1024) is None


def test_loops_without_recurrence_are_not_cut() -> None:
    # Trips that do not depend on each other leave no tape, and need no segments.
    k = Forward(X="*f32", Y="*f32", n="i32")
    b = k.b

    def body(index: Value, carries: list[Value]) -> list[Value]:
        return [b.add(carries[0], b.load(k.X, b.add(b.mul(index, b.const(N)), b.arange(0, N))))]

    (total,) = b.loop((b.const(0), k.n, b.const(1)), [b.whole(b.const(0.0, "f32"), (N,))], body, names=["total"])
    b.store(k.Y, b.arange(0, N), total)
    assert cut(k.kernel, 1024) is None


def test_a_number_that_is_carried_from_tile_to_tile_stays_on_a_tape() -> None:
    # A bisection compares the sum of a row with 1 in each trip: to spare a tape of single numbers, rows were gone
    # through once more, though no trip loads anything.
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, pid = k.b, k.b.program_id(0)
    row = b.load(k.X, b.arange(0, 16 * N))

    def body(_: Value, carries: list[Value]) -> list[Value]:
        above = b.elementwise(Code.MAX, (b.sub(row, b.whole(carries[0], (16 * N,))), b.zero(row)))
        return [b.unary(Code.TANH, b.mul(carries[0], b.sum(above, 0)))]

    (last,) = b.loop((b.const(0), k.n, b.const(1)), [b.const(0.5, "f32")], body, names=["h"])
    b.store(k.Y, pid, last)
    assert cut(k.kernel, 1024) is None
