"""What kernels do to memory: what is stored and read again, overwritten, and added to; and what is refused."""

from __future__ import annotations

import pytest
import torch
from reverse_checks import Forward, compare
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse import differentiate
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
