"""Adjoints of operations that work lane by lane, against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reverse_checks import Forward, compare
from torch import Tensor

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


def of_one(body: Callable[[Builder, Value], Value], element: str = "f32") -> Kernel:
    """Y[i] = body(X[i]) for eight elements."""
    k = Forward(X=f"*{element}", Y=f"*{element}")
    lanes = k.b.arange(0, 8)
    k.b.store(k.Y, lanes, body(k.b, k.b.load(k.X, lanes)))
    return k.kernel


def of_two(body: Callable[[Builder, Value, Value], Value]) -> Kernel:
    """Z[i] = body(X[i], Y[i]) for eight elements."""
    k = Forward(X="*f32", Y="*f32", Z="*f32")
    lanes = k.b.arange(0, 8)
    k.b.store(k.Z, lanes, body(k.b, k.b.load(k.X, lanes), k.b.load(k.Y, lanes)))
    return k.kernel


def spread(low: float = -2.0, high: float = 2.0) -> Tensor:
    return torch.linspace(low, high, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("code", "function", "low"),
    [
        (Code.NEG, torch.neg, -2.0),
        (Code.ABS, torch.abs, -2.0),
        (Code.EXP, torch.exp, -2.0),
        (Code.EXP2, torch.exp2, -2.0),
        (Code.LOG, torch.log, 0.1),
        (Code.LOG2, torch.log2, 0.1),
        (Code.SQRT, torch.sqrt, 0.1),
        (Code.RSQRT, torch.rsqrt, 0.1),
        (Code.SIN, torch.sin, -2.0),
        (Code.COS, torch.cos, -2.0),
        (Code.TANH, torch.tanh, -2.0),
        (Code.ERF, torch.erf, -2.0),
        (Code.SIGMOID, torch.sigmoid, -2.0),
        (Code.FLOOR, torch.floor, -2.0),
        (Code.CEIL, torch.ceil, -2.0),
    ],
)
def test_a_function_of_one_float_has_torchs_derivative(
    code: Code, function: Callable[[Tensor], Tensor], low: float
) -> None:
    compare(of_one(lambda b, x: b.unary(code, x)), {"X": spread(low)}, {"Y": (8,)}, function)


@pytest.mark.parametrize(
    ("body", "function"),
    [
        (lambda b, x, y: b.add(x, y), torch.add),
        (lambda b, x, y: b.sub(x, y), torch.sub),
        (lambda b, x, y: b.mul(x, y), torch.mul),
        (lambda b, x, y: b.div(x, y), torch.div),
        (lambda b, x, y: b.elementwise(Code.FMA, (x, y, x)), lambda x, y: x * y + x),
        (lambda b, x, y: b.elementwise(Code.MAX, (x, y), attributes={"nan": False}), torch.maximum),
        (lambda b, x, y: b.elementwise(Code.MIN, (x, y), attributes={"nan": True}), torch.minimum),
        (lambda b, x, y: b.mul(b.mul(x, x), b.div(y, x)), lambda x, y: x * x * (y / x)),
    ],
    ids=["add", "sub", "mul", "div", "fma", "max", "min", "several uses"],
)
def test_a_function_of_two_floats_has_torchs_derivatives(
    body: Callable[[Builder, Value, Value], Value], function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    compare(of_two(body), {"X": spread(), "Y": spread(0.7, -1.9)}, {"Z": (8,)}, function)


def test_remainders_pass_the_dividends_cotangent_and_minus_the_quotient_to_the_divisor() -> None:
    # torch.fmod has no derivative by the divisor of its own accord other than -trunc(x / y), which is what counts here
    kernel = of_two(lambda b, x, y: b.elementwise(Code.REM, (x, y)))
    compare(kernel, {"X": spread(-5.3, 6.1), "Y": spread(0.7, 1.9)}, {"Z": (8,)}, torch.fmod)


def test_equal_operands_of_a_maximum_share_evenly() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0, -1.0, 5.0], dtype=torch.float64)
    y = torch.tensor([1.0, 1.0, 3.0, 5.0, 0.0, 1.0, -1.0, 5.0], dtype=torch.float64)
    kernel = of_two(lambda b, a, c: b.elementwise(Code.MAX, (a, c), attributes={"nan": False}))
    compare(kernel, {"X": x, "Y": y}, {"Z": (8,)}, torch.maximum)


def test_the_absolute_value_of_zero_has_the_derivative_zero() -> None:
    compare(
        of_one(lambda b, x: b.unary(Code.ABS, x)), {"X": torch.zeros(8, dtype=torch.float64)}, {"Y": (8,)}, torch.abs
    )


def test_a_square_gets_its_cotangent_once() -> None:
    compare(of_one(lambda b, x: b.mul(x, x)), {"X": spread()}, {"Y": (8,)}, torch.square)


def test_a_choice_passes_the_cotangent_to_the_chosen_side() -> None:
    kernel = of_two(lambda b, x, y: b.select(b.compare("gt", x, b.const(0.5, "f32")), b.mul(x, y), b.sub(y, x)))
    compare(kernel, {"X": spread(), "Y": spread(3, 4)}, {"Z": (8,)}, lambda x, y: torch.where(x > 0.5, x * y, y - x))


def test_adjoints_of_narrow_floats_are_kept_in_f32() -> None:
    kernel = of_one(lambda b, x: b.cast(b.unary(Code.EXP, b.cast(x, "f32")), "bf16"), "bf16")
    adjoint = compare(kernel, {"X": spread()}, {"Y": (8,)}, torch.exp)
    assert adjoint.kernel.argument("dX").element == "*f32"
    assert adjoint.kernel.argument("dY").element == "*bf16", "a cotangent has the element of what it belongs to"


def test_adjoints_of_f64_stay_f64() -> None:
    adjoint = compare(of_one(lambda b, x: b.mul(x, x), "f64"), {"X": spread()}, {"Y": (8,)}, torch.square)
    assert adjoint.kernel.argument("dX").element == "*f64"


def test_a_float_made_of_an_integer_has_no_cotangent_to_pass_on() -> None:
    kernel = of_one(lambda b, x: b.mul(x, b.cast(b.cast(x, "i32"), "f32")))
    compare(kernel, {"X": spread()}, {"Y": (8,)}, lambda x: x * torch.trunc(x).detach())


def test_scalar_arguments_get_the_sum_over_lanes_and_programs() -> None:
    k = Forward(X="*f32", s="f32", Y="*f32")
    at = k.rows(4)
    k.b.store(k.Y, at, k.b.mul(k.b.load(k.X, at), k.s))
    inputs = {"X": spread(), "s": torch.tensor(1.7, dtype=torch.float64)}
    adjoint = compare(k.kernel, inputs, {"Y": (8,)}, lambda x, s: x * s, grid=(2,))
    assert adjoint.gradients["s"] == "ds"


def test_names_that_the_forward_uses_are_not_taken_for_gradients() -> None:
    k = Forward(X_ptr="*f32", dX="*f32", Y="*f32")
    lanes = k.b.arange(0, 8)
    k.b.store(k.Y, lanes, k.b.mul(k.b.load(k.X_ptr, lanes), k.b.load(k.dX, lanes)))
    inputs = {"X_ptr": spread(), "dX": spread(1, 2)}
    adjoint = compare(k.kernel, inputs, {"Y": (8,)}, torch.mul)
    assert len({value.name for value in adjoint.kernel.arguments}) == 6


def test_a_clamped_value_keeps_its_cotangent_on_the_bounds() -> None:
    def clamp(b: Builder, x: Value) -> Value:
        above = b.elementwise(Code.MAX, (x, b.const(-1.0, "f32")), attributes={"nan": False, "first": True})
        return b.elementwise(Code.MIN, (above, b.const(2.0, "f32")), attributes={"nan": False, "first": True})

    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -1.0, 2.0], dtype=torch.float64)
    compare(of_one(clamp), {"X": x}, {"Y": (8,)}, lambda x: x.clamp(-1.0, 2.0))
