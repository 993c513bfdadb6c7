"""What elementwise operations mean, on torch tensors: floats are exact in float64, integers have their width and wrap.

Integer operations are those of the executor of Triton's IR: both agree on what the device does where C does not say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa import philox
from kernel_agent.compiler.ssa.code import BY_DESCRIPTOR, BY_POINTER, Code
from kernel_agent.compiler.ssa.value import FLOATS, Op
from kernel_agent.ir.operations import integers, libdevice
from kernel_agent.ir.operations.registry import POINTWISE
from kernel_agent.ir.types import STORED_FLOATS

INTEGERS = {"i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
Elementwise = Callable[..., Tensor]


def held_as(element: str) -> torch.dtype:
    """The dtype that values of an element are computed in. Raises CannotDerive for one that is not known."""
    if element in FLOATS:
        return torch.float64
    if element in (BY_DESCRIPTOR, BY_POINTER):
        return torch.int64  # of the operation that makes it, which says it all
    if element not in INTEGERS:
        raise CannotDerive(f"values of type {element} cannot be evaluated")
    return INTEGERS[element]


def compute(op: Op, operands: list[Tensor]) -> Tensor:
    """Of ELEMENTWISE. Raises CannotDerive for library functions that are not known here."""
    if op.code is Code.CMP:
        return _compare(op, *operands)
    if op.code is Code.CAST:
        return _cast(op, *operands)
    if op.code is Code.BITCAST:
        return _bitcast(op, *operands)
    if op.code is Code.CALL:
        return _call(op, operands)
    dtype = held_as(op.result.element)
    if op.code is Code.SELECT:
        condition, a, b = operands
        return torch.where(condition, a.to(dtype), b.to(dtype))
    if op.code is Code.KNOWN:
        return torch.broadcast_to(operands[1], op.result.shape).to(dtype)
    operands = [value.to(dtype) for value in operands]
    if dtype is torch.float64:
        return _float(op)(*operands)
    if op.code is Code.NEG:
        return operands[0] if dtype is torch.bool else -operands[0]
    if op.code is Code.FMA:
        return operands[0] * operands[1] + operands[2]
    name = _UNSIGNED[op.code] if op.attributes.get("unsigned") else _INTEGER[op.code]
    return torch.as_tensor(POINTWISE[name](None, *operands))


_FLOAT: dict[Code, Elementwise] = {
    Code.ADD: torch.add, Code.SUB: torch.sub, Code.MUL: torch.mul, Code.DIV: torch.div, Code.REM: torch.fmod,
    Code.NEG: torch.neg, Code.FMA: lambda a, b, c: a * b + c, Code.ABS: torch.abs, Code.EXP: torch.exp,
    Code.EXP2: torch.exp2, Code.LOG: torch.log, Code.LOG2: torch.log2, Code.SQRT: torch.sqrt, Code.RSQRT: torch.rsqrt,
    Code.SIN: torch.sin, Code.COS: torch.cos, Code.TANH: torch.tanh, Code.ERF: torch.erf, Code.SIGMOID: torch.sigmoid,
    Code.FLOOR: torch.floor, Code.CEIL: torch.ceil,
}  # fmt: skip
_INTEGER = {
    Code.ADD: "arith.addi", Code.SUB: "arith.subi", Code.MUL: "arith.muli", Code.FLOORDIV: "arith.divsi",
    Code.REM: "arith.remsi", Code.MAX: "arith.maxsi", Code.MIN: "arith.minsi", Code.ABS: "math.absi",
    Code.AND: "arith.andi", Code.OR: "arith.ori", Code.XOR: "arith.xori", Code.SHL: "arith.shli",
    Code.SHR: "arith.shrsi", Code.MULHI: "tt.mulhiui",
}  # fmt: skip
_UNSIGNED = {
    Code.FLOORDIV: "arith.divui", Code.REM: "arith.remui", Code.MAX: "arith.maxui", Code.MIN: "arith.minui",
    Code.SHR: "arith.shrui",
}  # fmt: skip
_PREDICATES: dict[str, Elementwise] = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip


def _float(op: Op) -> Elementwise:
    if op.code in (Code.MAX, Code.MIN):
        names = ("minimum", "maximum") if op.attributes.get("nan") else ("fmin", "fmax")
        found: Elementwise = getattr(torch, names[op.code is Code.MAX])
        return found
    return _FLOAT[op.code]


def _compare(op: Op, a: Tensor, b: Tensor) -> Tensor:
    predicate = op.attributes["predicate"]
    if a.dtype.is_floating_point or predicate in ("eq", "ne"):
        return _PREDICATES[predicate](a, b)
    if op.attributes.get("unsigned"):
        a, b = integers.ordered(a), integers.ordered(b)
    elif a.dtype is torch.bool:
        a, b = ~a, ~b  # a signed true is -1
    return _PREDICATES[predicate](a, b)


def _cast(op: Op, value: Tensor) -> Tensor:
    """A condition becomes 0 or 1, and what is not zero becomes a condition; floats are not rounded."""
    wanted, unsigned = held_as(op.result.element), bool(op.attributes.get("unsigned"))
    if wanted is torch.bool:
        return value != 0
    if wanted is torch.float64:
        whole = not value.dtype.is_floating_point
        return integers.unsigned_to_float(value) if whole and unsigned else value.to(torch.float64)
    if value.dtype.is_floating_point:
        return (integers.to_unsigned if unsigned else integers.to_integer)(value, wanted)
    if unsigned and integers.width_of(value) < 64:
        value = integers.widened(value)
    return value.to(wanted)


def _bitcast(op: Op, value: Tensor) -> Tensor:
    """Of the value as its element holds it: a float is rounded for this."""
    source, target = op.operands[0].element, op.result.element
    stored = value.to(STORED_FLOATS.get(source, value.dtype)).contiguous()
    return stored.view(STORED_FLOATS.get(target) or held_as(target)).to(held_as(target))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


_FUNCTIONS: dict[str, Elementwise] = {
    "tl.rand": philox.rand,
    "tl.randn": philox.randn,
    "tl.randint": philox.randint,
    "lgamma_slope": torch.digamma,
    "libdevice.softplus": _softplus,
    "libdevice.softplus2": lambda x: torch.logaddexp2(x, torch.zeros_like(x)),
    "libdevice.nextafter": torch.nextafter,
}


def _call(op: Op, operands: list[Tensor]) -> Tensor:
    name = str(op.attributes["function"])
    function = _FUNCTIONS.get(name)
    if function is None and name.startswith("libdevice."):
        function = libdevice.meaning(name.removeprefix("libdevice."))
    if function is None:
        raise CannotDerive(
            f"the library function {name} cannot be evaluated", remedy="write it with Triton's own operations"
        )
    return torch.as_tensor(function(*operands)).to(held_as(op.result.element))
