"""Which loops that run backwards may run forwards."""

from collections.abc import Callable

import pytest
import torch

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.order import forwards
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

Body = Callable[[Builder, Value, Value], Value]
"""(builder, what X holds at this trip, carry) -> next carry."""


def add(b: Builder, x: Value, acc: Value) -> Value:
    return b.add(acc, x)


def subtract_squared_after_adding(b: Builder, x: Value, acc: Value) -> Value:
    return b.sub(b.add(x, acc), b.mul(x, x))


def within_a_loop(b: Builder, x: Value, acc: Value) -> Value:
    bounds = (b.const(0), b.const(3), b.const(1))
    (total,) = b.loop(bounds, [acc], lambda i, c: [b.add(c[0], b.mul(x, b.cast(i, "f64")))])
    return total


def decay(b: Builder, x: Value, acc: Value) -> Value:
    return b.add(b.mul(acc, b.const(0.5, "f64")), x)


def subtract_from(b: Builder, x: Value, acc: Value) -> Value:
    return b.sub(x, acc)


def add_what_depends_on_it(b: Builder, x: Value, acc: Value) -> Value:
    return b.add(acc, b.mul(x, acc))


def double(b: Builder, _: Value, acc: Value) -> Value:
    return b.add(acc, acc)


def store_it_on_the_way(b: Builder, x: Value, acc: Value) -> Value:
    b.store(b.kernel.argument("Y"), b.const(1), acc, code=Code.ATOMIC_ADD)
    return b.add(acc, x)


def store_over(b: Builder, x: Value, acc: Value) -> Value:
    b.store(b.kernel.argument("Y"), b.const(1), x)
    return b.add(acc, x)


def read_what_it_adds_to(b: Builder, x: Value, acc: Value) -> Value:
    y = b.kernel.argument("Y")
    seen = b.load(y, b.const(1))
    b.store(y, b.const(1), b.mul(x, b.add(seen, x)), code=Code.ATOMIC_ADD)
    return b.add(acc, x)


def add_to_memory(b: Builder, x: Value, acc: Value) -> Value:
    b.store(b.kernel.argument("Y"), b.const(1), b.mul(x, x), code=Code.ATOMIC_ADD)
    return b.add(acc, x)


def decay_within_a_loop(b: Builder, x: Value, acc: Value) -> Value:
    (total,) = b.loop((b.const(0), b.const(2), b.const(1)), [acc], lambda _, c: [decay(b, x, c[0])])
    return total


def backwards(body: Body) -> Kernel:
    x, y, n = Value("*f64", name="X"), Value("*f64", name="Y"), Value("i32", name="N")
    kernel = Kernel("k", [x, y, n])
    b = Builder(kernel, frozenset({y}))
    bounds = (b.const(0), n, b.const(1))
    start = b.const(1.0, "f64")
    (total,) = b.loop(bounds, [start], lambda i, c: [body(b, b.load(x, i), c[0])], reverse=True)
    b.store(y, b.const(0), total)
    return kernel


def run(kernel: Kernel) -> torch.Tensor:
    y = torch.zeros(2, dtype=torch.float64)
    evaluate(kernel, (1,), {"X": torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64), "Y": y, "N": 4})
    return y


def is_backwards(kernel: Kernel) -> bool:
    return any(op.attributes["reverse"] for op in kernel.ops if op.code is Code.FOR)


@pytest.mark.parametrize("body", [add, subtract_squared_after_adding, within_a_loop, add_to_memory])
def test_a_loop_that_adds_up_runs_forwards(body: Body) -> None:
    kernel = backwards(body)
    turned = forwards(kernel)
    assert not is_backwards(turned)
    assert torch.equal(run(turned), run(kernel))


@pytest.mark.parametrize(
    "body",
    [
        decay,
        subtract_from,
        add_what_depends_on_it,
        double,
        store_it_on_the_way,
        store_over,
        read_what_it_adds_to,
        decay_within_a_loop,
    ],
)
def test_a_loop_whose_order_matters_stays_as_it_is(body: Body) -> None:
    assert is_backwards(forwards(backwards(body)))


@pytest.mark.parametrize("body", [decay, store_it_on_the_way, store_over, read_what_it_adds_to, decay_within_a_loop])
def test_the_order_does_matter_in_the_loops_that_stay(body: Body) -> None:
    # Shows that the cases above are refused for a reason: turned by force, they store something else.
    kernel = backwards(body)
    expected = run(kernel)
    for op in kernel.ops:
        if op.code is Code.FOR:
            op.attributes["reverse"] = False
    assert not torch.equal(run(kernel), expected)


def with_tape(*, own: bool) -> Kernel:
    """A loop that loads a tape: stored in the same trip, or by a loop before."""
    x, y, n = Value("*f64", name="X"), Value("*f64", name="Y"), Value("i32", name="N")
    kernel = Kernel("k", [x, y, n])
    b = Builder(kernel, frozenset({y}))
    bounds = (b.const(0), n, b.const(1))

    def store(index: Value) -> None:
        b.add_op(Op(Code.TAPE_STORE, (b.load(x, index),), (), {"tape": "t"}))

    def body(index: Value, carries: list[Value]) -> list[Value]:
        if own:
            store(index)
        (found,) = b.add_op(Op(Code.TAPE_LOAD, (), (Value("f64"),), {"tape": "t"})).results
        return [b.add(carries[0], found)]

    if not own:

        def first(index: Value, _: list[Value]) -> list[Value]:
            store(index)
            return []

        b.loop(bounds, [], first)
    (total,) = b.loop(bounds, [b.const(0.0, "f64")], body, reverse=True)
    b.store(y, b.const(0), total)
    return kernel


def test_a_loop_that_loads_another_loops_tape_stays_and_one_that_loads_its_own_is_turned() -> None:
    assert is_backwards(forwards(with_tape(own=False)))
    assert not is_backwards(forwards(with_tape(own=True)))
