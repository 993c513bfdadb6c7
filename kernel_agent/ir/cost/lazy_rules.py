"""How operations on integers, masks and pointers are computed term by term.

A rule takes (op, *operands) and gives the result, or None when whole tiles are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_agent.ir.cost.lazy import All, Sum, bounds, lazy_all, lazy_sum, terms_of
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Pointer, RuntimeValue


def _add(op: Op, a: RuntimeValue, b: RuntimeValue) -> RuntimeValue | None:
    if not (_integers(a) and _integers(b)):
        return None
    sign = -1 if op.name == "arith.subi" else 1
    terms = [*terms_of(a), *(sign * term.to(torch.int64) for term in terms_of(b))]
    return lazy_sum(terms, op.results[0].type.dtype)


def _multiply(_: Op, a: RuntimeValue, b: RuntimeValue) -> RuntimeValue | None:
    if isinstance(b, Sum):
        a, b = b, a
    if not (isinstance(a, Sum) and isinstance(b, Tensor) and b[0].numel() == 1):
        return None
    return lazy_sum([term * b.to(torch.int64) for term in a.terms], a.dtype)


def _add_pointer(op: Op, pointer: Pointer, offset: RuntimeValue) -> RuntimeValue | None:
    if not _integers(offset):
        return None
    scale = 1
    if pointer.buffer is None:
        pointee = op.results[0].type.scalar.element
        scale = max(1, (pointee.bits if pointee else 8) // 8)
    terms = [*terms_of(pointer.offset), *(term.to(torch.int64) * scale for term in terms_of(offset))]
    return Pointer(pointer.buffer, lazy_sum(terms, torch.int64), pointer.view)


def _integers(value: RuntimeValue) -> bool:
    return isinstance(value, Sum) or (isinstance(value, Tensor) and value.dtype in _WIDTHS)


_WIDTHS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _widen(op: Op, value: RuntimeValue) -> RuntimeValue | None:
    if not isinstance(value, Sum) or (op.name == "arith.extui" and bounds(value)[0] < 0):
        return None
    return Sum(value.terms, op.results[0].type.dtype)


def _and(_: Op, a: RuntimeValue, b: RuntimeValue) -> RuntimeValue | None:
    if not all(isinstance(value, All) or (isinstance(value, Tensor) and value.dtype == torch.bool) for value in (a, b)):
        return None
    return lazy_all([*terms_of(a), *terms_of(b)])


_ALWAYS: dict[int, Callable[[tuple[int, int], tuple[int, int]], bool | None]] = {
    2: lambda a, b: True if a[1] < b[0] else False if a[0] >= b[1] else None,
    3: lambda a, b: True if a[1] <= b[0] else False if a[0] > b[1] else None,
    4: lambda a, b: True if a[0] > b[1] else False if a[1] <= b[0] else None,
    5: lambda a, b: True if a[0] >= b[1] else False if a[1] < b[0] else None,
}
"""Signed comparisons (less, less or equal, greater, greater or equal) of numbers of which only bounds are known."""


def _compare(op: Op, a: RuntimeValue, b: RuntimeValue) -> RuntimeValue | None:
    if not (_integers(a) and _integers(b)) or not op.results[0].type.tile:
        return None
    predicate = op.attributes["predicate"]
    first, second = bounds(a), bounds(b)
    if predicate >= 6 and min(first[0], second[0]) >= 0:
        predicate -= 4
    decide = _ALWAYS.get(predicate)
    known = None if decide is None else decide(first, second)
    if known is None:
        return None
    return torch.full((1,) * (1 + len(op.results[0].type.tile)), known)


def _expand(op: Op, value: RuntimeValue) -> RuntimeValue | None:
    return _moved(value, lambda term: term.unsqueeze(op.attributes["axis"] + 1))


def _transpose(op: Op, value: RuntimeValue) -> RuntimeValue | None:
    order = [axis + 1 for axis in op.attributes["order"]]
    return _moved(value, lambda term: term.permute(0, *order))


def _same(_: Op, value: RuntimeValue) -> RuntimeValue:
    return value


def _moved(value: RuntimeValue, change: Callable[[Tensor], Tensor]) -> RuntimeValue | None:
    if isinstance(value, (Sum, All)):
        return value.map(change)
    if isinstance(value, Pointer) and isinstance(value.offset, Sum):
        return value.map(lambda offset: offset.map(change))
    return None


LAZY_RULES: dict[str, Callable[..., RuntimeValue | None]] = {
    "arith.addi": _add,
    "arith.subi": _add,
    "arith.muli": _multiply,
    "arith.extsi": _widen,
    "arith.extui": _widen,
    "arith.index_cast": _widen,
    "arith.andi": _and,
    "arith.cmpi": _compare,
    "tt.addptr": _add_pointer,
    "tt.expand_dims": _expand,
    "tt.trans": _transpose,
    "tt.broadcast": _same,
    "ttg.convert_layout": _same,
}
