"""Integer arithmetic, exact at the declared width: results wrap; unsigned operations read the same bits unsigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import POINTWISE, pointwise
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Pointer

_UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def unsigned(value: Tensor) -> Any:
    """The same bits as a NumPy array of the unsigned type."""
    array = value.detach().contiguous().numpy()
    return array if array.dtype == np.bool_ else array.view(_UNSIGNED[array.dtype.itemsize * 8])


def from_unsigned(array: Any) -> Tensor:
    """A tensor of the signed type with the bits of an unsigned array."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.dtype == np.bool_ else array.view(f"i{array.dtype.itemsize}"))


def _on_unsigned(function: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    return lambda _, a, b: from_unsigned(function(unsigned(a), unsigned(b)))


def _on_unsigned_divisor(function: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    def apply(_: Op, a: Tensor, b: Tensor) -> Tensor:
        return from_unsigned(function(unsigned(a), unsigned(_nonzero(b))))

    return apply


def _nonzero(divisor: Tensor) -> Tensor:
    """Division by zero is undefined on the device and must not end this process."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def _quotient(a: Tensor, b: Tensor, rounding: str) -> Tensor:
    """Signed division; by -1 it is negation, which wraps, where the processor's own instruction would trap."""
    quotient = torch.div(a, torch.where(b == -1, 1, _nonzero(b)), rounding_mode=rounding)
    return torch.where(b == -1, -a, quotient)


POINTWISE.update(
    {
        "arith.divui": _on_unsigned_divisor(np.floor_divide),
        "arith.remui": _on_unsigned_divisor(np.remainder),
        "arith.ceildivui": _on_unsigned_divisor(lambda a, b: a // b + (a % b != 0).astype(a.dtype)),
        "arith.maxui": _on_unsigned(np.maximum),
        "arith.minui": _on_unsigned(np.minimum),
        "arith.maxsi": lambda _, a, b: torch.maximum(a, b),
        "arith.minsi": lambda _, a, b: torch.minimum(a, b),
        "arith.andi": lambda _, a, b: torch.bitwise_and(a, b),
        "arith.ori": lambda _, a, b: torch.bitwise_or(a, b),
        "arith.xori": lambda _, a, b: torch.bitwise_xor(a, b),
        "arith.addi": lambda _, a, b: a ^ b if a.dtype == torch.bool else a + b,
        "arith.subi": lambda _, a, b: a ^ b if a.dtype == torch.bool else a - b,
        "arith.muli": lambda _, a, b: a & b if a.dtype == torch.bool else a * b,
        "arith.divsi": lambda _, a, b: _quotient(a, b, "trunc"),
        "arith.floordivsi": lambda _, a, b: _quotient(a, b, "floor"),
        "arith.ceildivsi": lambda _, a, b: -_quotient(-a, b, "floor"),
        "arith.remsi": lambda _, a, b: torch.fmod(a, _nonzero(b)),
        "math.absi": lambda _, a: torch.abs(a),
    }
)


@pointwise("arith.shli")
def _shift_left(_: Op, a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_left_shift(a, b)


@pointwise("arith.shrsi")
def _shift_right(_: Op, a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_right_shift(a, b)


@pointwise("arith.shrui")
def _shift_right_unsigned(_: Op, a: Tensor, b: Tensor) -> Tensor:
    bits, amount = unsigned(a), unsigned(b)
    width = bits.dtype.itemsize * 8
    kept = np.right_shift(bits, np.minimum(amount, width - 1).astype(bits.dtype))
    return from_unsigned(np.where(amount < width, kept, 0).astype(bits.dtype))


@pointwise("tt.mulhiui")
def _multiply_high(_: Op, a: Tensor, b: Tensor) -> Tensor:
    """Upper half of the double-width product."""
    x, y = unsigned(a), unsigned(b)
    if x.dtype != np.uint64:
        width = x.dtype.itemsize * 8
        product = x.astype(np.uint64) * y.astype(np.uint64)
        return from_unsigned((product >> np.uint64(width)).astype(x.dtype))
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    xl, xh, yl, yh = x & low, x >> half, y & low, y >> half
    middle = xh * yl + ((xl * yl) >> half)
    cross = xl * yh + (middle & low)
    return from_unsigned(xh * yh + (middle >> half) + (cross >> half))


_COMPARE = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
_COMPARE_UNSIGNED = {6: np.less, 7: np.less_equal, 8: np.greater, 9: np.greater_equal}


@pointwise("arith.cmpi")
def _compare(op: Op, a: Any, b: Any) -> Tensor:
    if isinstance(a, Pointer):
        a, b = a.address(), b.address()
    predicate = op.attributes["predicate"]
    if predicate < 6:
        return _COMPARE[predicate](a, b)
    return from_unsigned(_COMPARE_UNSIGNED[predicate](unsigned(a), unsigned(b)))


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
    return torch.from_numpy(unsigned(a).astype(np.float64))


@pointwise("arith.fptosi")
def _to_integer(op: Op, a: Tensor) -> Tensor:
    return a.detach().to(torch.int64).to(op.results[0].type.dtype)


@pointwise("arith.fptoui")
def _to_unsigned(op: Op, a: Tensor) -> Tensor:
    """Values from 2**63 on keep their bits."""
    large = a.detach() >= 2.0**63
    kept = torch.where(large, a.detach() - 2.0**63, a.detach()).to(torch.int64)
    return torch.where(large, kept ^ torch.iinfo(torch.int64).min, kept).to(op.results[0].type.dtype)
