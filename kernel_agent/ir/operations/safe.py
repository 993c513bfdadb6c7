"""Pointwise operations whose backward maps a zero cotangent to zero.

Masked lanes often hold values where a derivative is infinite or undefined; their cotangent is zero, but 0 x inf = NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import DERIVATIVES, POINTWISE

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_LN2, _LN10 = math.log(2.0), math.log(10.0)

DERIVATIVES.update(
    {
        "arith.mulf": lambda _, a, b: (b, a),
        "tt.approx_divf": lambda out, _, b: (1 / b, -out / b),
        "arith.divf": lambda out, _, b: (1 / b, -out / b),
        "tt.precise_divf": lambda out, _, b: (1 / b, -out / b),
        "math.fma": lambda _, a, b, __: (b, a, 1.0),
        "math.exp": lambda out, _: (out,),
        "math.exp2": lambda out, _: (out * _LN2,),
        "math.log": lambda _, a: (1 / a,),
        "math.log2": lambda _, a: (1 / (a * _LN2),),
        "math.log1p": lambda _, a: (1 / (1 + a),),
        "math.sqrt": lambda out, _: (0.5 / out,),
        "tt.precise_sqrt": lambda out, _: (0.5 / out,),
        "math.rsqrt": lambda out, a: (-0.5 * out / a,),
        "math.log10": lambda _, a: (1 / (a * _LN10),),
        "math.tan": lambda out, _: (1 + out * out,),
        "math.powf": lambda out, a, b: (b * a ** (b - 1), out * a.log()),
        "math.sin": lambda _, a: (a.cos(),),
        "math.cos": lambda _, a: (-a.sin(),),
        "math.tanh": lambda out, _: (1 - out * out,),
    }
)


class SafePointwise(torch.autograd.Function):  # type: ignore[misc]
    """An operation of `DERIVATIVES`, on tensors that broadcast against each other."""

    @staticmethod
    def forward(ctx: Any, op: Any, *operands: Tensor) -> Tensor:
        """Compute as usual."""
        result = POINTWISE[op.name](op, *operands)
        ctx.name = op.name
        ctx.save_for_backward(result, *operands)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Chain rule, except that zero times anything is zero."""
        result, *operands = ctx.saved_tensors
        partials = DERIVATIVES[ctx.name](result, *operands)
        dead = gradient == 0
        return (
            None,
            *(
                torch.where(dead, 0.0, gradient * partial).sum_to_size(operand.shape)
                for partial, operand in zip(partials, operands, strict=True)
            ),
        )


def partials(function: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Partial derivatives of a function that works lane by lane, each of its operand's shape when all shapes agree."""
    with torch.enable_grad():
        inputs = [operand.detach().requires_grad_(operand.is_floating_point()) for operand in operands]
        floats = [given for given in inputs if given.requires_grad]
        result = function(*inputs)
        if not result.requires_grad:
            return (None,) * len(operands)
        found = iter(torch.autograd.grad(result.sum(), floats, allow_unused=True))
    return tuple(next(found) if given.requires_grad else None for given in inputs)


class SafeCall(torch.autograd.Function):  # type: ignore[misc]
    """A function that works lane by lane, on tensors of one shape, recomputed for its derivatives."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """Compute as usual."""
        ctx.function = function
        ctx.save_for_backward(*operands)
        return function(*operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Chain rule, except that zero times anything is zero."""
        dead = gradient == 0
        slopes = partials(ctx.function, ctx.saved_tensors)
        return (
            None,
            *(None if slope is None else torch.where(dead, 0.0, gradient * slope) for slope in slopes),
        )


def differentiable(machine: Machine, function: Callable[..., Any], operands: list[Tensor]) -> Any:
    """Call a function; in safe mode a zero cotangent stays zero where its derivative is infinite."""
    if any(operand.requires_grad for operand in operands) or not torch.is_grad_enabled():
        operands = list(torch.broadcast_tensors(*operands))
        if machine.safe:
            return SafeCall.apply(function, *operands)
        if machine.slopes is not None:
            machine.slopes.note(partials(function, tuple(operands)))
    return function(*operands)
