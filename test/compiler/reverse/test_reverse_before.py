"""Kernels that update memory in place read what it held before from an argument of its own."""

from __future__ import annotations

import torch
from reverse_checks import Forward

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.before import separated
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

N = 4


def carried(stride: int) -> Kernel:
    """x[t] becomes the sum of all before it, for trips whose tiles of N elements begin `stride` apart."""
    k = Forward(X="*f32", trips="i32")
    k.b = Builder(k.kernel, frozenset({k.X}))
    b = k.b
    lanes = b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        offset = b.add(b.mul(index, b.const(stride)), lanes)
        x = b.load(k.X, offset)
        b.store(k.X, offset, carries[0])
        return [b.add(carries[0], b.mul(x, x))]

    b.loop((b.const(0), k.trips, b.const(1)), [b.whole(b.const(0.0, "f32"), (N,))], body)
    return k.kernel


def test_what_a_trip_reads_before_it_stores_there_comes_from_an_argument_of_its_own() -> None:
    found = separated(carried(N), Calls())
    verify(found.kernel)
    assert found.names == {"X": "X_before"}
    before = torch.randn(3 * N, dtype=torch.float64)
    given = {"X": before.clone(), "X_before": before, "trips": 3}
    evaluate(found.kernel, (1,), given)
    rows = before.view(3, N).square()
    torch.testing.assert_close(given["X"].view(3, N), rows.cumsum(0) - rows)
    differentiate(found.kernel, read=frozenset({"X_before"}), written=frozenset({"X"}))  # `X` alone is refused


def test_trips_that_read_what_earlier_ones_stored_keep_their_argument() -> None:
    # Tiles overlap by a lane: the next trip reads a sum, not what was there before the launch.
    assert not separated(carried(N - 1), Calls()).names


def test_a_load_behind_a_store_elsewhere_keeps_its_argument() -> None:
    k = Forward(X="*f32")
    k.b = Builder(k.kernel, frozenset({k.X}))
    lanes = k.b.arange(0, N)
    k.b.store(k.X, lanes, k.b.whole(k.b.const(0.0, "f32"), (N,)))
    k.b.store(k.X, k.b.add(lanes, k.b.const(N)), k.b.load(k.X, k.b.sub(k.b.const(N - 1), lanes)))
    assert not separated(k.kernel, Calls()).names


def test_what_a_kernel_stored_itself_is_not_taken_for_what_was_there() -> None:
    k = Forward(X="*f32", Y="*f32")
    k.b = Builder(k.kernel, frozenset({k.Y}))
    lanes = k.b.arange(0, N)
    k.b.store(k.Y, lanes, k.b.unary(Code.EXP, k.b.load(k.X, lanes)))
    k.b.store(k.Y, k.b.add(lanes, k.b.const(N)), k.b.load(k.Y, lanes))
    assert not separated(k.kernel, Calls()).names
