"""Loops that need not wait for each other: factored sums, additions in the last loop, loops that are one."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.compiler.schedule.factor import factored
from kernel_agent.compiler.schedule.fuse import fused
from kernel_agent.compiler.schedule.merge import merged
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


def _two_sums(*, second: str) -> Kernel:
    """Y[0] = sum(2 X), and a second loop over the same trips that adds to Y[1]."""
    arguments = [Value("*f32", (), name) for name in ("X", "Y", "Z")] + [Value("i32", (), "n")]
    x_ptr, y_ptr, z_ptr, n = arguments
    kernel = Kernel("sums", arguments)
    b = Builder(kernel)
    lanes, bounds, zero = b.arange(0, 8), (b.const(0), n, b.const(1)), b.const(0.0, "f32")

    def row(index: Value) -> Value:
        return b.add(b.mul(index, b.const(8)), lanes)

    def first(index: Value, carries: list[Value]) -> list[Value]:
        x = b.load(x_ptr, row(index))
        b.store(z_ptr, row(index), b.mul(x, x), code=Code.ATOMIC_ADD)
        return [b.add(carries[0], b.sum(b.mul(x, b.const(2.0, "f32")), 0))]

    (total,) = b.loop(bounds, [zero], first)
    b.store(y_ptr, b.const(0), total)

    def later(index: Value, carries: list[Value]) -> list[Value]:
        x = b.load(x_ptr, row(index))
        if second == "linear":
            term = b.mul(x, total)
        elif second == "not linear":
            term = b.unary(Code.EXP, b.mul(x, total))
        elif second == "recurrent":
            return [b.add(b.mul(carries[0], total), b.sum(x, 0))]
        else:
            term = x
            b.store(z_ptr, row(index), b.mul(x, total if second == "same rows" else carries[0]), code=Code.ATOMIC_ADD)
        return [b.sub(carries[0], b.sum(term, 0))]

    (other,) = b.loop(bounds, [zero], later)
    b.store(y_ptr, b.const(1), other)
    return kernel


def _values(kernel: Kernel) -> dict[str, torch.Tensor]:
    given = {
        "X": torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        "Y": torch.zeros(2, dtype=torch.float64),
        "Z": torch.zeros(4, 8, dtype=torch.float64),
    }
    evaluate(kernel, (1,), {**given, "n": 4})
    return given


def _assert_same(found: Kernel, expected: Kernel) -> None:
    one, other = _values(found), _values(expected)
    for name in ("Y", "Z"):
        assert other[name].abs().max() > 1e-3
        torch.testing.assert_close(
            one[name], other[name], rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def _loops(kernel: Kernel) -> int:
    return sum(op.code is Code.FOR for op in kernel.ops)


def test_a_sum_of_multiples_of_an_earlier_sum_joins_its_loop() -> None:
    kernel = _two_sums(second="linear")
    assert _loops(fused(kernel)) == 2
    joined = fused(prune(factored(kernel)))
    assert _loops(joined) == 1
    _assert_same(joined, kernel)


@pytest.mark.parametrize("second", ["not linear", "recurrent"])
def test_a_sum_that_needs_an_earlier_one_waits_for_it(second: str) -> None:
    kernel = _two_sums(second=second)
    kept = fused(prune(factored(kernel)))
    assert _loops(kept) == 2
    _assert_same(kept, kernel)


def test_additions_to_the_same_rows_move_to_the_last_loop() -> None:
    kernel = _two_sums(second="same rows")
    found = merged(kernel)
    assert sum(op.code is Code.ATOMIC_ADD for op in found.ops) == 1
    _assert_same(found, kernel)


def test_an_addition_that_needs_what_its_loop_carries_stays() -> None:
    kernel = _two_sums(second="running")
    found = merged(kernel)
    _assert_same(found, kernel)


def test_a_factor_leaves_a_sum_of_what_is_read_where_the_kernel_writes() -> None:
    # the term was computed ahead of the loop's other operations, where such a read cannot be had, and all was refused
    z_ptr, y_ptr, n = Value("*f32", (), "Z"), Value("*f32", (), "Y"), Value("i32", (), "n")
    kernel = Kernel("reads", [Value("*f32", (), "X"), y_ptr, z_ptr, n])
    b = Builder(kernel, frozenset([z_ptr, y_ptr]))
    lanes, scale = b.arange(0, 8), b.const(3.0, "f32")

    def body(index: Value, carries: list[Value]) -> list[Value]:
        at = b.add(b.mul(index, b.const(8)), lanes)
        b.store(z_ptr, at, b.cast(at, "f32"))
        return [b.add(carries[0], b.sum(b.mul(b.load(z_ptr, at), scale), 0))]

    (total,) = b.loop((b.const(0), n, b.const(1)), [b.const(0.0, "f32")], body)
    b.store(y_ptr, b.const(0), total)
    found = prune(factored(kernel))
    assert not any(
        op.code is Code.MUL and op.result.is_float for loop in found.ops if loop.blocks for op in inside(loop)
    )
    _assert_same(found, kernel)


def inside(loop: Op) -> list[Op]:
    """The operations of a loop's body."""
    return loop.blocks[0].ops
