"""Mathematical functions that torch lacks, or that torch cannot differentiate. All on float64 tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Known(torch.autograd.Function):  # type: ignore[misc]
    """A function of one tensor with a derivative written down. A zero cotangent stays zero where that is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return torch.where(gradient == 0, 0.0, gradient * ctx.slope(x)), None, None


def with_slope(function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A differentiable function from a function and its derivative."""
    return lambda x: _Known.apply(x, function, slope)


def stepped(x: Tensor, value: Tensor) -> Tensor:
    """`value`, with the derivative of `x`: for functions that move x by an amount that is locally constant."""
    return x + (value - x).detach() if x.requires_grad else value


def _cube_root(x: Tensor) -> Tensor:
    root = torch.copysign(x.abs() ** (1.0 / 3.0), x)
    polished = root - (root * root * root - x) / (3.0 * root * root)  # one Newton step: pow rounds 1/3
    return torch.where((x == 0) | x.isinf(), x, polished)


cbrt = with_slope(_cube_root, lambda x: 1.0 / (3.0 * _cube_root(x) ** 2))
rcbrt = with_slope(lambda x: 1.0 / _cube_root(x), lambda x: -1.0 / (3.0 * _cube_root(x) * x))

exp10 = with_slope(lambda x: torch.pow(10.0, x), lambda x: torch.pow(10.0, x) * math.log(10.0))


def _gamma(x: Tensor) -> Tensor:
    size = torch.exp(torch.lgamma(x))
    below = torch.floor(x)
    value = torch.where((x < 0) & (torch.remainder(below, 2.0) != 0), -size, size)
    # factorials of small integers are exact
    whole = (x == below) & (x > 0) & (x < 23)
    value = torch.where(whole, torch.round(size), value)
    value = torch.where((x == below) & (x < 0), math.nan, value)
    return torch.where(x == 0, torch.copysign(torch.full_like(x, math.inf), x), value)


gamma = with_slope(_gamma, lambda x: _gamma(x) * torch.digamma(x))


def _sin_pi(x: Tensor) -> Tensor:
    rest = x - 2.0 * torch.round(x / 2.0)  # in [-1, 1], exact
    folded = torch.where(rest.abs() > 0.5, torch.copysign(1.0 - rest.abs(), rest), rest)
    return torch.sin(math.pi * folded)


def _cos_pi(x: Tensor) -> Tensor:
    rest = (x - 2.0 * torch.round(x / 2.0)).abs()
    return torch.where(
        rest < 0.25,
        torch.cos(math.pi * rest),
        torch.where(rest > 0.75, -torch.cos(math.pi * (1.0 - rest)), torch.sin(math.pi * (0.5 - rest))),
    )


sinpi = with_slope(_sin_pi, lambda x: math.pi * _cos_pi(x))
cospi = with_slope(_cos_pi, lambda x: -math.pi * _sin_pi(x))


def erfcinv(x: Tensor) -> Tensor:
    """By the normal quantile, which keeps small arguments apart where erfinv(1 - x) rounds them away."""
    return -torch.special.ndtri(x / 2.0) * math.sqrt(0.5)


def norm(*parts: Tensor) -> Tensor:
    """Euclidean length, without overflow."""
    scale = torch.stack(torch.broadcast_tensors(*[part.detach().abs() for part in parts])).amax(0)
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
    squares = sum(((part / safe) ** 2 for part in parts), torch.zeros_like(scale))
    return safe * torch.sqrt(squares)


def round_half_away(x: Tensor) -> Tensor:
    """The nearest integer, halves away from zero. Derivative zero."""
    return torch.trunc(x + torch.copysign(torch.full_like(x, math.nextafter(0.5, 0.0)), x))


def remainder(x: Tensor, y: Tensor) -> Tensor:
    """IEEE remainder x - n y with n = x / y rounded to the nearest even integer; d/dx = 1, d/dy = -n."""
    a, b = x.detach(), y.detach().abs()
    rest = torch.fmod(a.abs(), 2.0 * b)
    rest = torch.where(rest <= 0.5 * b, rest, torch.where(rest < 1.5 * b, rest - b, rest - 2.0 * b))
    rest = torch.where(b.isinf() & a.isfinite(), a.abs(), rest)
    return _divided(x, y, torch.copysign(torch.ones_like(a), a) * rest)


def fmod(x: Tensor, y: Tensor) -> Tensor:
    """Remainder with the sign of x; d/dx = 1, d/dy = -n, where x / y would round to a neighbour of n."""
    return _divided(x, y, torch.fmod(x.detach(), y.detach()))


def _divided(x: Tensor, y: Tensor, rest: Tensor) -> Tensor:
    """The remainder `rest` of x by y, with its derivatives."""
    if not (x.requires_grad or y.requires_grad):
        return rest
    turns = torch.round((x.detach() - rest) / y.detach())
    return rest + (x - x.detach()) - turns * (y - y.detach())


def scale_by_power(x: Tensor, power: Tensor) -> Tensor:
    """x * 2**n in two steps, so that neither overflows before the product does."""
    n = power.to(torch.float64).clamp(-4200.0, 4200.0)
    quarter = torch.trunc(n / 4.0)
    step = torch.exp2(quarter)
    return x * step * step * step * torch.exp2(n - 3.0 * quarter)


def exponent(x: Tensor) -> Tensor:
    """Unbiased binary exponent of finite values other than zero, as float64."""
    return (torch.frexp(x.detach()).exponent - 1).to(torch.float64)


def logb(x: Tensor) -> Tensor:
    """The exponent as a float: -inf for zero, inf for infinities."""
    value = x.detach()
    result = torch.where(value == 0, -math.inf, exponent(value))
    return torch.where(value.isfinite(), result, value.abs())


def ilogb(x: Tensor) -> Tensor:
    """The exponent as an integer: the least integer for zero and NaN, the largest for infinities."""
    value = x.detach()
    result = torch.where((value == 0) | value.isnan(), -(2.0**31), exponent(value))
    return torch.where(value.isinf(), 2.0**31 - 1.0, result).to(torch.int32)
