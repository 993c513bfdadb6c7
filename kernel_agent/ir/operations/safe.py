"""Pointwise operations whose backward maps a zero cotangent to zero.

Masked lanes often hold values where a derivative is infinite or undefined; their cotangent is zero, but 0 x inf = NaN.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import DERIVATIVES, POINTWISE

_LN2 = math.log(2.0)

DERIVATIVES.update(
    {
        "arith.mulf": lambda _, a, b: (b, a),
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
