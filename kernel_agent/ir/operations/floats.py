"""Arithmetic on floats. Values stay float64 whatever width the kernel declares; nothing rounds, casts included.

Where a function has a kink the gradient is that of torch: ties of maximum and minimum share it evenly, a clamped value
keeps it on the bounds, the derivative of the absolute value of zero is zero. `maxnumf` and `minnumf` drop NaN as the
device does, `maximumf` and `minimumf` hand it on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.operations import special
from kernel_agent.ir.operations.registry import POINTWISE, pointwise
from kernel_agent.ir.program import Op


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a torch function that needs to know nothing of the operation."""
    return lambda op, *operands: function(*operands)  # noqa: ARG005


def largest(a: Tensor, b: Tensor) -> Tensor:
    """The larger operand, or the one that is not NaN."""
    if not (a.requires_grad or b.requires_grad):
        return torch.fmax(a, b)
    return torch.maximum(torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b))


def least(a: Tensor, b: Tensor) -> Tensor:
    """The smaller operand, or the one that is not NaN."""
    if not (a.requires_grad or b.requires_grad):
        return torch.fmin(a, b)
    return torch.minimum(torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b))


POINTWISE.update(
    {
        name: _plain(function)
        for name, function in {
            "arith.addf": torch.add,
            "arith.subf": torch.sub,
            "arith.mulf": torch.mul,
            "arith.divf": torch.div,
            "arith.negf": torch.neg,
            "arith.remf": special.fmod,
            "arith.maxnumf": largest,
            "arith.minnumf": least,
            "arith.maximumf": torch.maximum,
            "arith.minimumf": torch.minimum,
            "tt.precise_divf": torch.div,
            "tt.approx_divf": torch.div,
            "tt.precise_sqrt": torch.sqrt,
            "math.exp": torch.exp,
            "math.exp2": torch.exp2,
            "math.expm1": torch.expm1,
            "math.log": torch.log,
            "math.log2": torch.log2,
            "math.log10": torch.log10,
            "math.log1p": torch.log1p,
            "math.sqrt": torch.sqrt,
            "math.rsqrt": torch.rsqrt,
            "math.sin": torch.sin,
            "math.cos": torch.cos,
            "math.tan": torch.tan,
            "math.tanh": torch.tanh,
            "math.erf": torch.erf,
            "math.absf": torch.abs,
            "math.floor": torch.floor,
            "math.ceil": torch.ceil,
            "math.trunc": torch.trunc,
            "math.round": special.round_half_away,
            "math.roundeven": torch.round,
            "math.powf": torch.pow,
            "math.copysign": torch.copysign,
        }.items()
    }
)


@pointwise("math.fma")
def _fma(_: Op, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


_PROPAGATES = 0xFFFF
"""Value of the `propagateNan` attribute with which NaN stays NaN."""


@pointwise("tt.clampf")
def _clamp(op: Op, value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`min(max(value, low), high)`: bounds that are out of order give the upper one, NaN gives the lower one."""
    clamped = torch.clamp(value, low, high)
    return clamped if op.attributes["propagateNan"] == _PROPAGATES else torch.where(value.isnan(), low, clamped)


@pointwise("arith.truncf", "arith.extf", "tt.fp_to_fp")
def _convert(_: Op, value: Tensor) -> Tensor:
    return value


_ORDERED = {1: torch.eq, 2: torch.gt, 3: torch.ge, 4: torch.lt, 5: torch.le, 6: torch.ne}


@pointwise("arith.cmpf")
def _compare(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """Predicates 1-6 are false on NaN, 8-13 true; 7 and 14 ask for NaN, 0 and 15 are constant."""
    predicate = op.attributes["predicate"]
    unordered = torch.isnan(a) | torch.isnan(b)
    if predicate in (0, 15):
        return torch.full_like(unordered, predicate == 15)
    if predicate in (7, 14):
        return unordered if predicate == 14 else ~unordered
    if predicate < 7:
        return _ORDERED[predicate](a, b) & ~unordered
    return _ORDERED[predicate - 7](a, b) | unordered
