"""Tapes in memory: the same gradients, in buffers that the launch's expressions say are large enough."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from reverse_checks import Forward, gradients_of
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import Fill
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.extents import Extents
from kernel_agent.compiler.reverse.plain import plain
from kernel_agent.compiler.reverse.tapes import lower_tapes, tapes
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

N = 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def recurrence(bound: str) -> Kernel:
    """Programs of one row each: h = tanh(h * x[pid, t]) for t up to a bound; Y[pid] = h."""
    k = Forward(X="*f32", L="*i32", Y="*f32", n="i32", block="i32")
    b, pid, lanes = k.b, k.b.program_id(0), k.b.arange(0, N)
    start, stop, step = b.const(0), k.n, b.const(1)
    if bound == "causal":
        stop = b.add(pid, b.const(1))
    elif bound == "strided":
        start, stop, step = pid, b.mul(k.n, k.block), k.block
    elif bound == "loaded":
        stop = b.load(k.L, pid)
    elif bound == "between":
        start, stop = b.load(k.L, pid), b.load(k.L, b.add(pid, b.const(1)))
    elif bound == "of a float":
        stop = b.cast(b.load(k.X, pid), "i32")
    elif bound in ("clusters", "segments"):
        tiles = b.elementwise(Code.FLOORDIV, (b.add(k.n, b.sub(k.block, b.const(1))), k.block))
        start = b.mul(b.elementwise(Code.FLOORDIV, (pid, tiles)), k.n) if bound == "clusters" else b.load(k.L, pid)
        stop = b.elementwise(Code.MIN, (b.add(start, k.n), b.mul(k.n, b.const(100))))

    def body(index: Value, carries: list[Value]) -> list[Value]:
        trip = b.elementwise(Code.REM, (index, k.n))
        at = b.add(b.mul(b.add(b.mul(pid, k.n), trip), b.const(N)), lanes)
        return [
            b.unary(Code.TANH, b.mul(carries[0], b.load(k.X, at))),
            b.compare("gt", carries[0], b.const(0.1, "f32")),
        ]

    first = b.whole(b.const(0.5, "f32"), (N,))
    h, flag = b.loop((start, stop, step), [first, b.whole(b.const(True, "i1"), (N,))], body, names=["h", "flag"])
    b.store(k.Y, b.add(b.mul(pid, b.const(N)), lanes), b.select(flag, h, b.mul(h, h)))
    return k.kernel


def bindings(grid: tuple[int, ...], integers: Mapping[str, Tensor | int]) -> dict[str, Tensor | int]:
    return {**{f"grid{axis}": extent for axis, extent in enumerate((*grid, 1, 1)[:3])}, **integers}


@pytest.mark.parametrize("bound", ["argument", "causal", "strided"])
def test_a_kernel_with_tapes_in_memory_gives_the_same_gradients(bound: str) -> None:
    kernel, integers = recurrence(bound), {"n": 4, "block": 2}
    x, y = numbers(3, 4, N), torch.full((3, N), torch.nan, dtype=torch.float64)
    arguments = {"X": x, "Y": y, "L": torch.ones(3, dtype=torch.int32), **integers}
    same_in_memory(kernel, arguments, integers)


def test_a_while_loop_that_counts_has_tapes_as_long_as_it_can_count() -> None:
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, at = k.b, k.rows(N)

    def test(carries: list[Value]) -> list[Value]:
        small = b.compare("lt", b.sum(carries[0], 0), b.const(9.0, "f32"))
        return [b.logical_and(small, b.compare("lt", carries[1], k.n)), *carries]

    def body(passed: list[Value]) -> list[Value]:
        return [
            b.mul(passed[0], b.unary(Code.EXP, b.div(passed[0], b.const(9.0, "f32")))),
            b.add(passed[1], b.const(2)),
        ]

    x, _ = b.repeat([b.load(k.X, at), b.const(1)], test, body)
    b.store(k.Y, at, x)
    x_value = torch.stack([torch.full((N,), value) for value in (2.0, 0.9, 0.1)]).double()
    arguments = {"X": x_value, "Y": torch.full((3, N), torch.nan, dtype=torch.float64), "n": 6}
    scalars = same_in_memory(k.kernel, arguments, {"n": 6})
    assert list(scalars.values()) == [3], "1, 3 and 5 are less than 6"


def same_in_memory(
    kernel: Kernel, arguments: dict[str, Tensor | int], integers: Mapping[str, Tensor | int]
) -> dict[str, int]:
    """Assert that tapes in memory change no gradient. Returns the trips that they have room for."""
    grid = (3,)
    evaluate(kernel, grid, arguments)
    x = arguments["X"]
    cotangent = {"Y": numbers(3, N, seed=1)}
    adjoint = differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    truth = gradients_of(adjoint, grid, arguments, cotangent)["X"]
    assert truth.abs().sum() > 0

    lowered = lower_tapes(adjoint.kernel)
    assert not [op for op in lowered.kernel.ops if op.code in (Code.TAPE_STORE, Code.TAPE_LOAD)]
    known = bindings(grid, integers)
    buffers = {}
    for buffer in lowered.buffers:
        shape = [eval(text, {"max": max, "min": min, "int": int}, known) for text in buffer.shape]
        dtype = torch.int8 if buffer.element == "i8" else torch.float64
        buffers[buffer.name] = torch.full((math.prod(shape),), 99, dtype=dtype)
        assert buffer.fill is Fill.EMPTY
    counts = {name: eval(text, {"max": max, "min": min, "int": int}, known) for name, text in lowered.scalars.items()}
    found = torch.zeros_like(x)
    evaluate(lowered.kernel, grid, {**arguments, **buffers, **counts, "dY": cotangent["Y"], "dX": found})
    torch.testing.assert_close(found, truth, msg="dX")
    return counts


@pytest.mark.parametrize("bound", ["clusters", "segments"])
def test_a_tape_is_as_long_as_a_bound_is_behind_the_start_that_it_was_computed_from(bound: str) -> None:
    # of the ranges of both bounds alone it was as long as the last stop, or refused where the start is loaded; and the
    # least number of tiles was taken for zero, which the launch divided by
    kernel, integers = recurrence(bound), {"n": 4, "block": 2}
    x, y = numbers(3, 4, N), torch.full((3, N), torch.nan, dtype=torch.float64)
    arguments = {"X": x, "Y": y, "L": torch.tensor([0, 4, 8], dtype=torch.int32), **integers}
    assert set(same_in_memory(kernel, arguments, integers).values()) == {4}


def test_a_divisor_whose_range_reaches_zero_is_taken_for_one_at_least() -> None:
    # the bound of the tape divided by zero where it was computed, though the kernel never did
    k = Forward(n="i32", m="i32")
    b = k.b
    tiles = b.elementwise(Code.FLOORDIV, (b.add(k.n, b.const(7)), b.const(8)))
    stop = b.elementwise(Code.FLOORDIV, (b.add(b.program_id(0), k.m), tiles))
    b.loop((b.const(0), stop, b.const(1)), [], lambda _index, _carries: [])
    (loop,) = (op for op in k.kernel.ops if op.code is Code.FOR)
    text = Extents({}).trips(loop)
    assert eval(text, {"n": 5, "m": 3, "grid0": 4, "max": max, "min": min}) >= 6


def test_tapes_that_two_trips_of_a_loop_around_may_share_are_as_long_as_one() -> None:
    k = Forward(X="*f32", Y="*f32", n="i32", m="i32")
    b, lanes = k.b, k.b.arange(0, N)

    def outer(index: Value, carries: list[Value]) -> list[Value]:
        def inner(step: Value, state: list[Value]) -> list[Value]:
            return [b.mul(state[0], b.unary(Code.SIN, state[0]))]

        x = b.load(k.X, b.add(b.mul(index, b.const(N)), lanes))
        (found,) = b.loop((b.const(0), k.m, b.const(1)), [x], inner, names=["state"])
        b.store(k.Y, b.add(b.mul(index, b.const(N)), lanes), found)
        return []

    b.loop((b.const(0), k.n, b.const(1)), [], outer)
    adjoint = differentiate(k.kernel, read=frozenset({"X"}), written=frozenset({"Y"}))
    (tape,) = [tape for tape in tapes(adjoint.kernel) if len(tape.trips) == 1 and tape.shape]
    assert (tape.element, tape.shape) == ("f32", (N,))


@pytest.mark.parametrize("bound", ["loaded", "between"])
def test_a_bound_that_is_loaded_is_at_most_the_largest_that_its_tensor_holds(bound: str) -> None:
    # refused before; between offsets that follow each other a tape is as long as the longest segment, not as all
    kernel, integers = recurrence(bound), {"n": 4, "block": 2}
    bounds = [1, 3, 2] if bound == "loaded" else [0, 1, 4, 6]
    x, y = numbers(3, 4, N), torch.full((3, N), torch.nan, dtype=torch.float64)
    loaded = torch.tensor(bounds, dtype=torch.int32)
    arguments = {"X": x, "Y": y, "L": loaded, **integers}
    assert set(same_in_memory(kernel, arguments, {**integers, "L": loaded}).values()) == {3}


def test_a_bound_that_is_computed_of_a_float_is_refused_and_the_line_says_what_to_do() -> None:
    adjoint = differentiate(recurrence("of a float"), read=frozenset({"X"}), written=frozenset({"Y"}))
    with pytest.raises(CannotDerive, match="bound the loop by arguments"):
        lower_tapes(adjoint.kernel)


def test_a_tape_of_a_launch_along_one_axis_asks_for_no_other() -> None:
    # It asked for three: texts of one axis named `tl.program_id(2)`, and no row's own schedule was had for them.
    adjoint = differentiate(recurrence("argument"), read=frozenset({"X"}), written=frozenset({"Y"}))
    lowered = lower_tapes(adjoint.kernel, axes=1)
    asked = {op.attributes["axis"] for op in lowered.kernel.ops if op.code in (Code.PROGRAM_ID, Code.NUM_PROGRAMS)}
    assert asked == {0}
    assert not any("grid1" in text or "grid2" in text for buffer in lowered.buffers for text in buffer.shape)


def test_the_plain_plan_allocates_tapes_and_zeroed_gradients() -> None:
    kernel = recurrence("argument")
    plan = plain(kernel, differentiate(kernel, read=frozenset({"X"}), written=frozenset({"Y"})))
    (step,) = plan.steps
    assert {buffer.name for buffer in plan.buffers} | set(step.scalars) <= {v.name for v in step.kernel.arguments}
    assert [buffer.like for buffer in plan.buffers if buffer.fill is Fill.ZEROS] == ["X"]
    assert plan.gradients == {"X": "dX"}
    assert plan.cotangents == {"Y": "dY"}
