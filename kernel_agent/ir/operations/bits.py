"""Floats that travel as integers.

`tl.sort`, `tl.flip`, packed keys and atomic extremes move floats through integer exclusive-or, select and shuffle
code. A `Bits` value holds the bit pattern next to the identity of the float each lane came from, so that the way back
finds the exact float64 value and its gradient instead of a rounded pattern.

An identity is a claim, checked on the way back against the pattern: integers that are close to the float they claim to
be are that float (rounding by bit tricks is a cast, and casts do not round here), those that differ from it in the
sign are its negative, and all others are a new number, made of the pattern, without a gradient. That is what torch
gives `x.view(torch.int32)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.integers import population, trailing_zeros, width_of
from kernel_agent.ir.operations.registry import POINTWISE, RULES, rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import STORED_FLOATS, Kind, Type
from kernel_agent.ir.values import Active, Bits, Pointer, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_PATTERN = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_CUT = 2.0**-7
"""Relative error of a bfloat16 that was cut off instead of rounded."""
_LEAST_KEPT = 7
"""Bits of the narrowest float without its sign."""
_UNKNOWN = -1
"""Identity of integers that hold two floats."""
_PAIR = 31
"""The exclusive-or of two floats has both identities, the larger one shifted by so many bits."""


def to_bits(machine: Machine, value: Tensor, float_type: Type, op: Op) -> Bits:
    """Floats -> integers of the same width, remembering the floats. Raises `UnsupportedOp` for unknown formats."""
    pattern = value.detach().to(stored_dtype(machine, float_type, op)).contiguous().view(_PATTERN[float_type.bits])
    start = machine.remember(value)
    return Bits(pattern, torch.arange(start + 1, start + 1 + value.numel(), device=value.device).view(value.shape))


def stored_dtype(machine: Machine, float_type: Type, op: Op) -> torch.dtype:
    """What memory holds of a float type. Raises `UnsupportedOp` for a format that torch does not know."""
    dtype = STORED_FLOATS.get(float_type.scalar.name)
    if dtype is None:
        raise machine.unsupported(op, f"the bits of {float_type.scalar.name} are not supported")
    return dtype


def to_floats(machine: Machine, value: Bits | Tensor, float_type: Type, op: Op) -> Tensor:
    """Integers -> floats of the same width: remembered floats come back exactly, others by their bit pattern."""
    pattern = value.pattern if isinstance(value, Bits) else value
    dtype = stored_dtype(machine, float_type, op)
    plain = pattern.contiguous().view(dtype).to(torch.float64)
    if not isinstance(value, Bits):
        return plain
    if bool(((value.element == _UNKNOWN) | (value.element >= 1 << _PAIR)).any()):
        raise machine.unsupported(op, "taking apart two floats packed into one integer is not supported")
    memory = machine.remembered()
    claimed = value.element.clamp(min=0, max=memory.numel())
    known = memory[(claimed - 1).clamp(min=0)]
    with torch.no_grad():
        exact = known if machine.faithful else known.detach()
        near = exact.to(dtype).to(torch.float64)  # beyond the range of the type both are infinite
        room = torch.where(near.isinf() | machine.faithful, 0.0, near.abs() * _CUT)
        same = ((plain - near).abs() <= room) | (plain == near) | (plain.isnan() & near.isnan())
        opposite = ((plain + near).abs() <= room) | (plain == -near)
        claims = claimed > 0
    # positive and negative zero are equal numbers: the sign bit tells
    flipped = opposite & (torch.signbit(plain) != torch.signbit(near)) & ~plain.isnan()
    result = torch.where(claims & same & ~(flipped & (near == 0)), known, plain)
    return torch.where(claims & flipped, -known, result)


@rule("tt.bitcast", "arith.bitcast")
def _bitcast(machine: Machine, op: Op, operands: list[Any], _: Active) -> list[RuntimeValue]:
    (value,) = operands
    source, target = op.operands[0].type.scalar, op.results[0].type.scalar
    if isinstance(value, Pointer):
        return [_seen_as(value, target)]
    if source.kind is Kind.FLOAT and target.kind is Kind.FLOAT:
        if source.name == target.name:
            return [value]
        value = to_bits(machine, value, source, op)  # one format read as another
        return [to_floats(machine, value.pattern, target, op)]
    if source.kind is target.kind:
        return [value if isinstance(value, Bits) else value.to(op.results[0].type.dtype)]
    if source.kind is Kind.FLOAT:
        return [to_bits(machine, value, source, op)]
    return [to_floats(machine, value, target, op)]


def _seen_as(pointer: Pointer, type_: Type) -> Pointer:
    """A pointer whose elements get another width counts bytes from here on."""
    pointee = type_.element
    if pointer.buffer is None or pointee is None or pointee.kind not in (Kind.INT, Kind.FLOAT):
        return pointer
    same = max(pointee.bits, 8) == 8 * pointer.buffer.itemsize
    return pointer if same else Pointer(None, pointer.address())


_MOVES = frozenset(
    {
        *("tt.reshape", "tt.expand_dims", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.trans", "tt.join", "tt.split"),
        *("tt.cat", "tt.gather", "arith.select"),
    }
)
"""Operations under which identities move exactly as patterns do."""

_KEEPS_FIRST = frozenset({"arith.trunci", "arith.extui", "arith.extsi"})
"""Operations that pack or unpack the first operand and keep its identity."""

_SHIFTS = frozenset({"arith.shli", "arith.shrui", "arith.shrsi"})
"""Operations that pack or unpack when they move whole bytes, and compute when they move single bits."""

_CHOICES = frozenset({"arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui"})

_TAKES_BITS = frozenset(
    {
        *("tt.bitcast", "arith.bitcast", "tt.store", "tt.descriptor_store", "tt.descriptor_scatter"),
        "tt.descriptor_reduce",
        *("tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_store", "tt.extern_elementwise", "tt.elementwise_inline_asm"),
        *("tt.reduce", "tt.scan", "tt.map_elementwise", "tt.call", "scf.for", "scf.if", "scf.while"),
    }
)
"""Operations whose rules know `Bits` themselves, or only pass values on."""


def apply_to_bits(machine: Machine, op: Op, operands: list[RuntimeValue], active: Active) -> list[RuntimeValue]:
    """Run an operation some of whose operands are `Bits`."""
    if op.name in _TAKES_BITS:
        return list(RULES[op.name](machine, op, operands, active))
    patterns = [_pattern(value) for value in operands]
    results = _plain(machine, op, patterns, active)
    elements = _identities(machine, op, operands, results, active)
    if elements is None:
        return results
    return [Bits(*torch.broadcast_tensors(result, element)) for result, element in zip(results, elements, strict=True)]


def _identities(
    machine: Machine, op: Op, operands: list[RuntimeValue], results: list[Any], active: Active
) -> Sequence[Tensor] | None:
    """The floats that results claim to be; None when they are new numbers."""
    if op.name in _KEEPS_FIRST:
        return [_identity(operands[0])]
    if op.name in _SHIFTS and isinstance(operands[0], Bits):
        amount = operands[1].pattern if isinstance(operands[1], Bits) else operands[1]
        whole = (amount % 8 == 0) & (amount < width_of(operands[0].pattern))
        return [torch.where(whole, _identity(operands[0]), 0)]
    if op.name == "arith.andi":
        carrier, other = operands if isinstance(operands[0], Bits) else operands[::-1]
        mask = other.pattern if isinstance(other, Bits) else other
        return [torch.where(_keeps_a_float(mask), _identity(carrier), 0)]
    if op.name == "arith.ori":
        first, second = (_identity(value) for value in operands)
        return [torch.where((first != 0) & (second != 0) & (first != second), _UNKNOWN, first | second)]
    if op.name == "arith.xori":
        return [_exclusive(machine, _identity(operands[0]), _identity(operands[1]))]
    if op.name in _MOVES:
        fixed = {"arith.select": 0, "tt.gather": 1}.get(op.name)
        if not any(isinstance(value, Bits) for place, value in enumerate(operands) if place != fixed):
            return None  # the bits only say which elements move
        ids = [_pattern(value) if place == fixed else _identity(value) for place, value in enumerate(operands)]
        return _plain(machine, op, ids, active)
    if op.name in _CHOICES:
        first = operands[0].pattern if isinstance(operands[0], Bits) else operands[0]
        return [torch.where(results[0] == first, _identity(operands[0]), _identity(operands[1]))]
    if op.name in ("arith.addi", "arith.subi"):  # a little more or less, to round by hand
        first, second = (_identity(value) for value in operands)
        return [
            torch.where(second == 0, first, second if op.name == "arith.addi" else 0) * ((first == 0) | (second == 0))
        ]
    return None


def _exclusive(machine: Machine, first: Tensor, second: Tensor) -> Tensor:
    """Identities of an exclusive-or: a float twice cancels, two make a pair, and one of a pair takes itself out of it.

    Copies of one float may have been cast one by one: those of equal value cancel, too.
    """
    first, second = torch.broadcast_tensors(first, second)
    result = torch.where(first == second, 0, torch.where((first == 0) | (second == 0), first | second, _UNKNOWN))
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    differ = (low > 0) & (low != high)
    if not bool(differ.any()):
        return result
    single = differ & (low < 1 << _PAIR)
    result = torch.where(single & (high < 1 << _PAIR), (high << _PAIR) | low, result)
    one, other = high >> _PAIR, high & ((1 << _PAIR) - 1)
    memory = machine.remembered().detach().to(torch.float32)

    def equal(left: Tensor, right: Tensor) -> Tensor:
        values = [memory[(part - 1).clamp(min=0, max=memory.numel() - 1)] for part in (left, right)]
        return (left == right) | (values[0] == values[1])

    left_over = torch.where(equal(one, other), low, _UNKNOWN)
    left_over = torch.where(equal(low, other), one, left_over)
    left_over = torch.where(equal(low, one), other, left_over)
    left_over = torch.where(low == other, one, left_over)
    return torch.where(single & (high >= 1 << _PAIR), left_over, result)


def _keeps_a_float(mask: Tensor) -> Tensor:
    """Masks that cut off whole bytes, or up to half a float32; one that leaves an exponent or a bit makes a number."""
    lowest = trailing_zeros(mask)
    return (population(mask) >= _LEAST_KEPT) & ((lowest % 8 == 0) | ((lowest <= 16) & (width_of(mask) >= 32)))


def _plain(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Any]:
    function = POINTWISE.get(op.name)
    if function is not None:
        return [function(op, *operands)]
    if op.name not in RULES:
        raise machine.unsupported(op, f"operation {op.name} on the bits of floats is not supported")
    return list(RULES[op.name](machine, op, operands, active))


def _identity(value: RuntimeValue) -> Tensor:
    """Identities of a value's lanes; zero for integers that are no floats' bits."""
    return value.element if isinstance(value, Bits) else value.new_zeros((1,) * value.dim(), dtype=torch.int64)


def _pattern(value: RuntimeValue) -> RuntimeValue:
    """A value as plain integers."""
    return value.pattern if isinstance(value, Bits) else value
