"""Integer arithmetic, exact at the declared width: results wrap; unsigned operations read the same bits unsigned.

What LLVM leaves undefined is what the device does: shifts by the width or more clear all bits (arithmetic right
shifts leave the sign), the least integer divided by -1 wraps. A division by zero, for which the device promises
nothing, divides by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import POINTWISE, pointwise
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Pointer


def width_of(value: Tensor) -> int:
    """Bits of an integer tensor's elements; a boolean has one."""
    return 1 if value.dtype == torch.bool else 8 * value.element_size()


def widened(value: Tensor) -> Tensor:
    """Elements of at most 32 bits read unsigned, as int64."""
    wide = value.to(torch.int64)
    return wide if value.dtype == torch.bool else wide & ((1 << width_of(value)) - 1)


def ordered(value: Tensor) -> Tensor:
    """Integers whose signed order is the unsigned order of `value`."""
    return value if value.dtype == torch.bool else value ^ torch.iinfo(value.dtype).min


def _nonzero(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def quotient(a: Tensor, b: Tensor, rounding: str) -> Tensor:
    """Signed division; by -1 it is negation, which wraps, where the processor's own instruction would trap."""
    if a.dtype == torch.bool:
        return a & b
    result = torch.div(a, torch.where(b == -1, 1, _nonzero(b)), rounding_mode=rounding)
    return torch.where(b == -1, -a, result)


def _remainder(_: Op, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return torch.zeros_like(a & b)
    return torch.fmod(a, torch.where(b == -1, 1, _nonzero(b)))


def quotient_unsigned(a: Tensor, b: Tensor) -> Tensor:
    """Unsigned division of the same bits."""
    if a.dtype == torch.bool:
        return a & b
    b = _nonzero(b)
    if width_of(a) < 64:
        return widened(a).div(widened(b), rounding_mode="floor").to(a.dtype)
    half = shift_right(a, torch.ones_like(a))
    guess = half.div(torch.where(b > 0, b, 1), rounding_mode="floor") << 1  # at most one too small
    exact = guess + (ordered(a - guess * b) >= ordered(b)).to(a.dtype)
    return torch.where(b > 0, exact, (ordered(a) >= ordered(b)).to(a.dtype))


def shift_left(a: Tensor, amount: Tensor) -> Tensor:
    """Bits shifted up; amounts of the width or more, read unsigned, leave nothing."""
    if a.dtype == torch.bool:
        return a & ~amount
    inside = (amount >= 0) & (amount < width_of(a))
    return torch.where(inside, a << torch.where(inside, amount, 0), 0)


def shift_right(a: Tensor, amount: Tensor) -> Tensor:
    """Bits shifted down, zeros from above; amounts of the width or more, read unsigned, leave nothing."""
    if a.dtype == torch.bool:
        return a & ~amount
    width = width_of(a)
    inside = (amount >= 0) & (amount < width)
    steps = torch.where(inside, amount, 0)
    if width < 64:
        moved = (widened(a) >> steps.to(torch.int64)).to(a.dtype)
    else:
        once = (a >> 1) & torch.iinfo(torch.int64).max
        moved = torch.where(steps == 0, a, once >> (steps - 1).clamp(min=0))
    return torch.where(inside, moved, 0)


def shift_right_signed(a: Tensor, amount: Tensor) -> Tensor:
    """Bits shifted down, the sign from above; amounts of the width or more, read unsigned, leave the sign alone."""
    if a.dtype == torch.bool:
        return a
    last = width_of(a) - 1
    return a >> torch.where((amount >= 0) & (amount < last), amount, last)


def multiply_high(a: Tensor, b: Tensor) -> Tensor:
    """Upper half of the double-width unsigned product."""
    width = width_of(a)
    if width < 32:
        return ((widened(a) * widened(b)) >> width).to(a.dtype)
    if width == 32:
        product = widened(a) * widened(b)
        return (product >> 32).to(a.dtype)
    low = (1 << 32) - 1
    half = torch.full_like(a, 32)
    xl, xh, yl, yh = a & low, shift_right(a, half), b & low, shift_right(b, torch.full_like(b, 32))
    middle = xh * yl
    middle = middle + shift_right(xl * yl, torch.full_like(middle, 32))
    cross = xl * yh + (middle & low)
    down = torch.full_like(cross, 32)
    return xh * yh + shift_right(middle, down) + shift_right(cross, down)


def multiply_high_signed(a: Tensor, b: Tensor) -> Tensor:
    """Upper half of the double-width signed product."""
    return multiply_high(a, b) - torch.where(a < 0, b, 0) - torch.where(b < 0, a, 0)


def _least_unsigned(a: Tensor, b: Tensor, *, largest: bool) -> Tensor:
    return torch.where((ordered(a) > ordered(b)) == largest, a, b)


def _absolute(_: Op, a: Tensor) -> Tensor:
    return a if a.dtype == torch.bool else torch.abs(a)


def _ceiling_unsigned(_: Op, a: Tensor, b: Tensor) -> Tensor:
    whole = quotient_unsigned(a, b)
    return whole + (a - whole * _nonzero(b) != 0).to(a.dtype)


def _remainder_unsigned(_: Op, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return torch.zeros_like(a & b)
    return a - quotient_unsigned(a, b) * _nonzero(b)


POINTWISE.update(
    {
        "arith.divui": lambda _, a, b: quotient_unsigned(a, b),
        "arith.remui": _remainder_unsigned,
        "arith.ceildivui": _ceiling_unsigned,
        "arith.maxui": lambda _, a, b: _least_unsigned(a, b, largest=True),
        "arith.minui": lambda _, a, b: _least_unsigned(a, b, largest=False),
        "arith.maxsi": lambda _, a, b: a & b if a.dtype == torch.bool else torch.maximum(a, b),  # true is -1
        "arith.minsi": lambda _, a, b: a | b if a.dtype == torch.bool else torch.minimum(a, b),
        "arith.andi": lambda _, a, b: torch.bitwise_and(a, b),
        "arith.ori": lambda _, a, b: torch.bitwise_or(a, b),
        "arith.xori": lambda _, a, b: torch.bitwise_xor(a, b),
        "arith.addi": lambda _, a, b: a ^ b if a.dtype == torch.bool else a + b,
        "arith.subi": lambda _, a, b: a ^ b if a.dtype == torch.bool else a - b,
        "arith.muli": lambda _, a, b: a & b if a.dtype == torch.bool else a * b,
        "arith.divsi": lambda _, a, b: quotient(a, b, "trunc"),
        "arith.floordivsi": lambda _, a, b: quotient(a, b, "floor"),
        "arith.ceildivsi": lambda _, a, b: -quotient(-a, b, "floor"),
        "arith.remsi": _remainder,
        "arith.shli": lambda _, a, b: shift_left(a, b),
        "arith.shrsi": lambda _, a, b: shift_right_signed(a, b),
        "arith.shrui": lambda _, a, b: shift_right(a, b),
        "tt.mulhiui": lambda _, a, b: multiply_high(a, b),
        "math.absi": _absolute,
        "math.ctpop": lambda _, a: population(a),
        "math.ctlz": lambda _, a: leading_zeros(a),
        "math.cttz": lambda _, a: trailing_zeros(a),
    }
)


def population(a: Tensor) -> Tensor:
    """How many bits are set."""
    bits = sum((a >> place) & 1 for place in range(width_of(a)))
    return torch.as_tensor(bits, dtype=a.dtype)


def leading_zeros(a: Tensor) -> Tensor:
    """How many bits above the highest set one; the width for zero."""
    width = width_of(a)
    filled, step = a, 1
    while step < width:
        filled = filled | shift_right(filled, torch.full_like(filled, step))
        step *= 2
    return width - population(filled)


def trailing_zeros(a: Tensor) -> Tensor:
    """How many bits below the lowest set one; the width for zero."""
    return population((a & -a) - 1)


_COMPARE = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


@pointwise("arith.cmpi")
def _compare(op: Op, a: Any, b: Any) -> Tensor:
    if isinstance(a, Pointer):
        a, b = a.address(), b.address()
    predicate = op.attributes["predicate"]
    if predicate < 2:
        return _COMPARE[predicate](a, b)
    if predicate < 6:
        signed = (~a, ~b) if a.dtype == torch.bool else (a, b)  # true is -1
        return _COMPARE[predicate](*signed)
    return _COMPARE[predicate - 4](ordered(a), ordered(b))


# --- conversions


@pointwise("arith.extsi")
def _extend_signed(op: Op, a: Tensor) -> Tensor:
    wide = a.to(op.results[0].type.dtype)
    return -wide if a.dtype == torch.bool else wide


@pointwise("arith.extui")
def _extend_unsigned(op: Op, a: Tensor) -> Tensor:
    dtype = op.results[0].type.dtype
    if a.dtype == torch.bool:
        return a.to(dtype)
    return a.to(dtype) & ((1 << op.operands[0].type.bits) - 1)


@pointwise("arith.trunci")
def _truncate(op: Op, a: Tensor) -> Tensor:
    dtype = op.results[0].type.dtype
    return (a & 1).to(torch.bool) if dtype == torch.bool else a.to(dtype)


@pointwise("arith.index_cast", "arith.index_castui")
def _index(op: Op, a: Tensor) -> Tensor:
    return a.to(op.results[0].type.dtype)


@pointwise("arith.sitofp")
def _to_float(_: Op, a: Tensor) -> Tensor:
    return -a.to(torch.float64) if a.dtype == torch.bool else a.to(torch.float64)


@pointwise("arith.uitofp")
def _unsigned_to_float(_: Op, a: Tensor) -> Tensor:
    return unsigned_to_float(a)


def unsigned_to_float(a: Tensor) -> Tensor:
    """The same bits read unsigned, as the nearest float64."""
    if width_of(a) < 64:
        return widened(a).to(torch.float64)
    high = (a >> 32) & ((1 << 32) - 1)
    return high.to(torch.float64) * 2.0**32 + (a & ((1 << 32) - 1)).to(torch.float64)


@pointwise("arith.fptosi")
def _to_integer(op: Op, a: Tensor) -> Tensor:
    return to_integer(a, op.results[0].type.dtype)


def to_integer(a: Tensor, dtype: torch.dtype) -> Tensor:
    """Truncated towards zero. As `cvt.rzi` does, values out of range saturate and NaN gives zero; 8 bits are the
    lower half of 16."""
    info = torch.iinfo(torch.int16 if dtype == torch.int8 else torch.int8 if dtype == torch.bool else dtype)
    value = a.detach().nan_to_num(nan=0.0)
    inside = value.clamp(float(info.min), float(info.max)) if info.bits < 64 else value
    too_large = inside >= 2.0**63
    kept = torch.where(too_large | (inside < -(2.0**63)), 0.0, inside).to(torch.int64)
    kept = torch.where(too_large, info.max, torch.where(inside < -(2.0**63), info.min, kept))
    return (kept & 1).to(dtype) if dtype == torch.bool else kept.to(dtype)


@pointwise("arith.fptoui")
def _to_unsigned(op: Op, a: Tensor) -> Tensor:
    return to_unsigned(a, op.results[0].type.dtype)


def to_unsigned(a: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits of the unsigned integer below; saturates like `to_integer`."""
    bits = 16 if dtype in (torch.int8, torch.bool) else torch.iinfo(dtype).bits
    value = a.detach().nan_to_num(nan=0.0).clamp(min=0.0)
    if bits < 64:
        kept = value.clamp(max=float((1 << bits) - 1)).to(torch.int64)
    else:
        upper = value >= 2.0**63
        kept = torch.where(upper, value - 2.0**63, value).clamp(max=float(2**63 - 1024)).to(torch.int64)
        kept = torch.where(upper, kept ^ torch.iinfo(torch.int64).min, kept)
        kept = torch.where(value >= 2.0**64, -1, kept)
    return (kept & 1).to(dtype) if dtype == torch.bool else kept.to(dtype)
