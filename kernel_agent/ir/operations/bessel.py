"""Bessel functions at float64 precision; torch's own are good to 1e-8 only.

Up to 25 the integral over a period (DLMF 10.9.2) gives J_n by the trapezoidal rule, which converges faster than any
power, and Neumann's series (DLMF 10.8.3) gives Y; beyond, Hankel's expansion (DLMF 10.17.3) does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernel_agent.ir.operations.special import with_slope

_NEAR = 25.0
_EULER = 0.57721566490153286


def _integral(order: Tensor, x: Tensor, points: int) -> Tensor:
    """J_n(x) = mean of cos(n t - x sin t) over a period."""
    angle = torch.arange(points, device=x.device, dtype=torch.float64) * (2.0 * math.pi / points)
    return torch.cos(order.unsqueeze(-1) * angle - x.unsqueeze(-1) * torch.sin(angle)).mean(-1)


def _far(order: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """J and Y of order 0 or 1 for large x."""
    terms, term = [torch.ones_like(x)], torch.ones_like(x)
    for k in range(1, 24):
        term = term * (4.0 * order**2 - (2.0 * k - 1.0) ** 2) / (8.0 * k * x)
        terms.append(term)
    even = sum(terms[k] * (-1) ** (k // 2) for k in range(0, 24, 2))
    odd = sum(terms[k] * (-1) ** (k // 2) for k in range(1, 24, 2))
    phase = x - (0.5 * order + 0.25) * math.pi
    size = torch.sqrt(2.0 / (math.pi * x))
    return size * (phase.cos() * even - phase.sin() * odd), size * (phase.sin() * even + phase.cos() * odd)


def _first(order: int) -> Callable[[Tensor], Tensor]:
    def value(x: Tensor) -> Tensor:
        size = x.abs()
        near = _integral(torch.full((), float(order), device=x.device, dtype=torch.float64), size.clamp(max=_NEAR), 128)
        result = torch.where(size <= _NEAR, near, _far(order, size.clamp(min=_NEAR))[0])
        return torch.where((x < 0) & (order == 1), -result, result)

    return value


def _second(order: int) -> Callable[[Tensor], Tensor]:
    def value(x: Tensor) -> Tensor:
        near = x.clamp(0.0, _NEAR)
        orders = torch.arange(0, 56, device=x.device, dtype=torch.float64)
        j = _integral(orders.expand(*x.shape, 56), near.unsqueeze(-1), 192)
        k = torch.arange(1, 27, device=x.device)
        weight = (1.0 - 2.0 * (k % 2)).to(torch.float64) / k
        log = torch.log(near / 2.0) + _EULER
        if order == 0:
            result = 2.0 / math.pi * (log * j[..., 0] - 2.0 * (j[..., 2 * k] * weight).sum(-1))
        else:
            slopes = 0.5 * (j[..., 2 * k - 1] - j[..., 2 * k + 1])
            result = 2.0 / math.pi * (log * j[..., 1] - j[..., 0] / near + 2.0 * (slopes * weight).sum(-1))
        result = torch.where(x == 0, -math.inf, result)
        return torch.where(x <= _NEAR, result, _far(order, x.clamp(min=_NEAR))[1])

    return value


_J0, _J1, _Y0, _Y1 = _first(0), _first(1), _second(0), _second(1)

j0 = with_slope(_J0, lambda x: -_J1(x))
j1 = with_slope(_J1, lambda x: torch.where(x == 0, 0.5, _J0(x) - _J1(x) / x))
y0 = with_slope(_Y0, lambda x: -_Y1(x))
y1 = with_slope(_Y1, lambda x: _Y0(x) - _Y1(x) / x)


def _first_of(order: Tensor, x: Tensor) -> Tensor:
    reach = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) + float(order.abs().max())
    return _integral(order, x, 64 + 2 * math.ceil(reach))


def _second_of(order: Tensor, x: Tensor) -> Tensor:
    """Y_n by upward recurrence, which is stable for this kind. DLMF 10.6.1."""
    size = order.abs()
    before, now = _Y0(x), _Y1(x)
    value = torch.where(size == 0, before, now)
    for k in range(1, int(size.max())):
        before, now = now, 2.0 * k / x * now - before
        value = torch.where(size == k + 1, now, value)
    return torch.where((order < 0) & (size % 2 == 1), -value, value)


def _of_order(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def apply(order: Tensor, x: Tensor) -> Tensor:
        n, x = torch.broadcast_tensors(order.to(torch.float64), x)

        def value(at: Tensor) -> Tensor:
            return function(n, at)

        def slope(at: Tensor) -> Tensor:
            return 0.5 * (function(n - 1.0, at) - function(n + 1.0, at))

        return with_slope(value, slope)(x)

    return apply


jn = _of_order(_first_of)
"""(integer order, x) -> J_n(x), to an absolute error of about 1e-16."""
yn = _of_order(_second_of)
"""(integer order, x) -> Y_n(x)."""
