"""Rounding to narrow float formats, on float64 tensors that then hold representable values.

Every function takes a float64 tensor of any shape and returns one of the same shape. NaN stays NaN. Subnormal numbers
are kept: nothing is flushed to zero.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

_EXPONENT = 0x7FF0000000000000
"""Bits of a float64 that hold its exponent: alone they are the power of two below its magnitude."""
_TF32_KEPT = -(1 << 13)
"""Bits of a float32 that tensor cores read of a tf32 operand: 10 of 23 below the point."""


class Mode(str, enum.Enum):
    """Where a value between two representable ones goes."""

    NEAREST = "nearest"
    """To the nearer one, in the middle to the even one."""
    TO_ZERO = "to zero"


def rounded(values: Tensor, dtype: torch.dtype, mode: Mode = Mode.NEAREST, *, saturate: bool = False) -> Tensor:
    """Values rounded to a floating dtype. Beyond its range they become infinite (NaN where it has no infinity) to
    nearest, and the largest finite value towards zero; with `saturate` always the largest, for infinite ones too.
    """
    if dtype == torch.float64:
        return values
    if dtype == torch.float32:
        single = values.to(torch.float32)
        return _pulled_in(single, values).to(torch.float64) if mode is Mode.TO_ZERO else single.to(torch.float64)
    kind = torch.finfo(dtype)
    size = values.abs().clamp(min=kind.smallest_normal).contiguous()
    quantum = (size.view(torch.int64) & _EXPONENT).view(torch.float64) * kind.eps
    steps = values / quantum
    result = (steps.round() if mode is Mode.NEAREST else steps.trunc()) * quantum
    result = torch.where(values.isfinite(), result, values)
    if saturate:
        return result.clamp(-kind.max, kind.max)
    if mode is Mode.TO_ZERO:
        return torch.where(values.isfinite(), result.clamp(-kind.max, kind.max), _overflowed(values, dtype))
    return torch.where(result.abs() > kind.max, _overflowed(result, dtype), result)


def _overflowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a format has for numbers beyond it: infinity of the same sign, or NaN in formats without one."""
    finite_only = dtype not in (torch.float16, torch.bfloat16, torch.float8_e5m2)
    return torch.full_like(values, torch.nan) if finite_only else values.sign() * torch.inf


def _pulled_in(single: Tensor, values: Tensor) -> Tensor:
    """float32 numbers, each the nearest of a float64 value, moved one step where they lie farther from zero."""
    farther = single.to(torch.float64).abs() > values.abs()
    return torch.where(farther, torch.nextafter(single, torch.zeros_like(single)), single)


def tf32_truncated(values: Tensor) -> Tensor:
    """float32 values as tensor cores read them: the low 13 bits are ignored."""
    bits = values.to(torch.float32).contiguous().view(torch.int32)
    return (bits & _TF32_KEPT).view(torch.float32).to(torch.float64)


def tf32_nearest(values: Tensor) -> Tensor:
    """float32 values as `cvt.rna.tf32.f32` rounds them: to nearest, in the middle away from zero."""
    bits = values.to(torch.float32).contiguous().view(torch.int32)
    near = ((bits + (1 << 12)) & _TF32_KEPT).view(torch.float32).to(torch.float64)
    return torch.where(values.isfinite(), near, values)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 or narrower values in float64, rounded to odd: rounding it once more is then correct.

    The product of two float32 numbers is exact. The error of the sum is Knuth's two-sum; where it is not zero, the
    neighbour with an odd last bit keeps the information that the sum was not exact (Boldo and Melquiond 2008).
    """
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.contiguous().view(torch.int64) & 1) == 0
    inexact = even & (error != 0) & error.isfinite() & total.isfinite()
    return torch.where(inexact, torch.nextafter(total, error.sign() * torch.inf), total)
