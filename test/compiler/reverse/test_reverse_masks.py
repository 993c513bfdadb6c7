"""Lanes that are off stay out of gradients, whatever is infinite there, and no `where` stands where none is needed."""

from __future__ import annotations

import math

import torch
from reverse_checks import Forward, compare
from torch import Tensor

from kernel_agent.compiler.reverse import Adjoint
from kernel_agent.compiler.ssa.code import Code

N, WIDE = 5, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def selects(adjoint: Adjoint) -> int:
    return sum(op.code is Code.SELECT for op in adjoint.kernel.ops)


def test_padding_under_a_logarithm_does_not_reach_a_scalars_gradient() -> None:
    # d/ds of log(s * x) is 1 / s, but 0 * (1 / (s * 0)) is NaN in the three lanes that are off, and is summed
    k = Forward(X="*f32", s="f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    mask = b.compare("lt", lanes, k.n)
    x = b.load(k.X, lanes, mask, b.const(0.0, "f32"))
    b.store(k.Y, lanes, b.unary(Code.LOG, b.mul(x, k.s)), mask)
    inputs = {"X": numbers(N).abs(), "s": torch.tensor(1.3, dtype=torch.float64)}
    adjoint = compare(k.kernel, inputs, {"Y": (N,)}, lambda x, s: torch.log(x * s), integers={"n": N})
    assert selects(adjoint) == 1


def test_loads_that_do_not_say_what_masked_lanes_hold_are_padded() -> None:
    k = Forward(X="*f32", s="f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    mask = b.compare("lt", lanes, k.n)
    b.store(k.Y, lanes, b.mul(b.load(k.X, lanes, mask), k.s), mask)
    inputs = {"X": numbers(N), "s": torch.tensor(1.3, dtype=torch.float64)}
    adjoint = compare(k.kernel, inputs, {"Y": (N,)}, lambda x, s: x * s, integers={"n": N})
    assert all(op.other is not None for op in adjoint.kernel.ops if op.code is Code.LOAD)
    assert selects(adjoint) == 0, "a padded lane is finite"


def test_a_guarded_logarithm_has_no_nan_where_the_guard_fails() -> None:
    # the where of the forward hides log(0); its adjoint divides zero by zero there, into an unmasked gradient
    k = Forward(X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    x = b.load(k.X, lanes)
    zero = b.const(0.0, "f32")
    b.store(k.Y, lanes, b.select(b.compare("gt", x, zero), b.unary(Code.LOG, x), zero))
    x_value = torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 3.0, 0.0, 4.0], dtype=torch.float64)

    def reference(x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.log(torch.where(x > 0, x, 1.0)), 0.0)

    compare(k.kernel, {"X": x_value}, {"Y": (WIDE,)}, reference)


def test_an_exponential_that_overflows_where_it_is_not_chosen_does_no_harm() -> None:
    k = Forward(X="*f32", Y="*f32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    x = b.load(k.X, lanes)
    b.store(k.Y, lanes, b.select(b.compare("gt", x, b.const(0.0, "f32")), x, b.unary(Code.EXP, x)))
    x_value = torch.tensor([-1.0, 800.0, 1.0, -2.0, 900.0, 3.0, -0.5, 4.0], dtype=torch.float64)

    def reference(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.exp(torch.where(x > 0, 0.0, x)))

    compare(k.kernel, {"X": x_value}, {"Y": (WIDE,)}, reference)


def test_softmax_padded_with_minus_infinity_needs_no_where() -> None:
    k = Forward(X="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    mask = b.compare("lt", lanes, k.n)
    at = b.add(b.mul(b.program_id(0), k.n), lanes)
    x = b.load(k.X, at, mask, b.const(-math.inf, "f32"))
    p = b.unary(Code.EXP, b.sub(x, b.reduce(Code.REDUCE_MAX, x, 0)))
    b.store(k.Y, at, b.div(p, b.sum(p, 0)), mask)
    adjoint = compare(
        k.kernel, {"X": numbers(3, N)}, {"Y": (3, N)}, lambda x: x.softmax(1), grid=(3,), integers={"n": N}
    )
    chosen = [op for op in adjoint.kernel.ops if op.code is Code.SELECT]
    assert len(chosen) == 1, "the maximum's own adjoint has one; the masked exponentials are finite"


def test_rows_that_are_off_stay_out_of_sums_over_rows() -> None:
    # rows beyond n are padded with -inf: their softmax is NaN, and so is what the column sum would add of them
    k = Forward(X="*f32", W="*f32", Y="*f32", n="i32")
    b = k.b
    rows, columns = b.arange(0, WIDE), b.arange(0, 4)
    down, along = b.expand(rows, 1), b.expand(columns, 0)
    mask = b.compare("lt", down, k.n)
    at = b.add(b.mul(down, b.const(4)), along)
    x = b.load(k.X, at, mask, b.const(-math.inf, "f32"))
    p = b.unary(Code.EXP, b.sub(x, b.expand(b.reduce(Code.REDUCE_MAX, x, 1), 1)))
    y = b.mul(b.div(p, b.expand(b.sum(p, 1), 1)), b.expand(b.load(k.W, columns), 0))
    b.store(k.Y, at, y, mask)
    inputs = {"X": numbers(N, 4), "W": numbers(4, seed=1)}
    compare(k.kernel, inputs, {"Y": (N, 4)}, lambda x, w: x.softmax(1) * w, integers={"n": N})


def test_rows_that_are_off_stay_out_of_products() -> None:
    # d of the right operand sums over rows: exp of a padded row overflows, and its cotangent is zero
    k = Forward(X="*f32", W="*f32", Y="*f32", n="i32")
    b = k.b
    rows, columns, inner = b.arange(0, WIDE), b.arange(0, 4), b.arange(0, 2)
    mask = b.compare("lt", b.expand(rows, 1), k.n)
    at_x = b.add(b.mul(b.expand(rows, 1), b.const(2)), b.expand(inner, 0))
    at_w = b.add(b.mul(b.expand(inner, 1), b.const(4)), b.expand(columns, 0))
    at_y = b.add(b.mul(b.expand(rows, 1), b.const(4)), b.expand(columns, 0))
    left = b.unary(Code.EXP, b.load(k.X, at_x, mask, b.const(1e4, "f32")))
    b.store(k.Y, at_y, b.dot(left, b.load(k.W, at_w)), mask)
    inputs = {"X": numbers(N, 2), "W": numbers(2, 4, seed=1)}
    compare(k.kernel, inputs, {"Y": (N, 4)}, lambda x, w: x.exp() @ w, integers={"n": N})


def test_a_masked_lanes_padding_gets_the_cotangent_that_memory_does_not() -> None:
    k = Forward(X="*f32", s="f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    x = b.load(k.X, lanes, b.compare("lt", lanes, k.n), k.s)
    b.store(k.Y, lanes, b.mul(x, x))
    inputs = {"X": numbers(N), "s": torch.tensor(1.3, dtype=torch.float64)}
    reference = lambda x, s: torch.cat([x, s.expand(WIDE - N)]) ** 2  # noqa: E731
    compare(k.kernel, inputs, {"Y": (WIDE,)}, reference, integers={"n": N})


def test_a_loop_over_masked_columns_keeps_their_lanes_out_of_what_it_sums() -> None:
    k = Forward(X="*f32", W="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, 4)
    w = b.load(k.W, b.const(0))

    def body(index, carries):
        at = b.add(index, lanes)
        mask = b.compare("lt", at, k.n)
        x = b.load(k.X, at, mask, b.const(0.0, "f32"))
        b.store(k.Y, at, b.unary(Code.RSQRT, b.mul(x, w)), mask)
        return []

    b.loop((b.const(0), k.n, b.const(4)), [], body)
    inputs = {"X": numbers(N).abs() + 0.1, "W": torch.tensor([0.7], dtype=torch.float64)}
    compare(k.kernel, inputs, {"Y": (N,)}, lambda x, w: torch.rsqrt(x * w), integers={"n": N})


def test_long_chains_of_operations_neither_take_long_nor_nest_too_deep() -> None:
    # every step reads the last one twice: whoever asked anew for each reader would ask 2 ** 400 times
    k = Forward(X="*f32", s="f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    mask = b.compare("lt", lanes, k.n)
    x = b.load(k.X, lanes, mask, b.const(0.0, "f32"))
    scale = b.add(b.mul(x, x), b.const(1.0, "f32"))
    for _ in range(400):
        scale = b.div(b.add(scale, b.unary(Code.ABS, scale)), b.const(2.0, "f32"))
    b.store(k.Y, lanes, b.div(k.s, scale), mask)
    inputs = {"X": numbers(N), "s": torch.tensor(1.3, dtype=torch.float64)}
    compare(k.kernel, inputs, {"Y": (N,)}, lambda x, s: s / (x * x + 1), integers={"n": N})


def test_infinite_padding_does_not_reach_the_gradient_of_what_it_is_multiplied_with() -> None:
    # the probabilities of padded lanes are zero, but zero times -inf is NaN, and is summed into the temperature's
    k = Forward(X="*f32", B="*f32", T="*f32", Y="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    mask = b.compare("lt", lanes, k.n)
    x = b.load(k.X, lanes, mask, b.const(-math.inf, "f32"))
    biased = b.add(x, b.load(k.B, lanes, mask, b.const(0.0, "f32")))
    powers = b.unary(Code.EXP, b.mul(biased, b.load(k.T, b.const(0))))
    b.store(k.Y, lanes, b.div(powers, b.sum(powers, 0)), mask)
    inputs = {"X": numbers(N), "B": numbers(N, seed=1), "T": numbers(1, seed=2)}
    compare(k.kernel, inputs, {"Y": (N,)}, lambda x, bias, t: ((x + bias) * t).softmax(0), integers={"n": N})
