"""Floats that travel as integers.

`tl.sort`, `tl.flip` and atomic extremes move floats through integer exclusive-or, select and shuffle code. A `Bits`
value holds the bit pattern next to the identity of the float each lane came from, so that the way back finds the
exact float64 value and its gradient instead of a rounded pattern.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import POINTWISE, RULES, rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import STORED_FLOATS, Kind, Type
from kernel_agent.ir.values import Active, Bits, Pointer, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_PATTERN = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def to_bits(machine: Machine, value: Tensor, float_type: Type) -> Bits:
    """Floats -> integers of the same width, remembering the floats. `float_type` gives the width and format."""
    width = float_type.bits
    stored = STORED_FLOATS.get(float_type.name, {16: torch.float16, 32: torch.float32}.get(width, torch.float64))
    pattern = value.detach().to(stored).contiguous().view(_PATTERN[width])
    start = machine.remember(value)
    return Bits(pattern, torch.arange(start + 1, start + 1 + value.numel(), device=value.device).view(value.shape))


def to_floats(machine: Machine, value: Bits | Tensor, float_type: Type) -> Tensor:
    """Integers -> floats of the same width: remembered floats come back exactly, others by their bit pattern."""
    pattern = value.pattern if isinstance(value, Bits) else value
    plain = pattern.contiguous().view(STORED_FLOATS[float_type.name]).to(torch.float64)
    if not isinstance(value, Bits):
        return plain
    known = machine.remembered()
    return torch.where(value.element > 0, known[(value.element - 1).clamp(min=0)], plain)


@rule("tt.bitcast", "arith.bitcast")
def _bitcast(machine: Machine, op: Op, operands: list[Any], _: Active) -> list[RuntimeValue]:
    (value,) = operands
    source, target = op.operands[0].type.scalar, op.results[0].type.scalar
    if isinstance(value, Pointer) or source.kind is target.kind:
        return [value if isinstance(value, (Pointer, Bits)) else value.to(op.results[0].type.dtype)]
    if source.kind is Kind.FLOAT:
        return [to_bits(machine, value, source)]
    return [to_floats(machine, value, target)]


_MOVES = frozenset(
    {
        "tt.reshape",
        "tt.expand_dims",
        "tt.splat",
        "tt.unsplat",
        "tt.broadcast",
        "tt.trans",
        "tt.join",
        "tt.split",
        "tt.cat",
        "tt.gather",
        "tt.reduce",
        "arith.xori",
        "arith.ori",
        "arith.select",
    }
)
"""Operations under which identities move exactly as patterns do."""

_KEEPS_FIRST = frozenset({"arith.trunci", "arith.extui", "arith.extsi", "arith.shli", "arith.shrui", "arith.shrsi"})
"""Operations that pack or unpack the first operand and keep its identity."""


_TAKES_BITS = frozenset(
    {
        "tt.bitcast",
        "arith.bitcast",
        "tt.store",
        "tt.descriptor_store",
        "tt.atomic_rmw",
        "tt.extern_elementwise",
        "tt.call",
        "scf.for",
        "scf.if",
        "scf.while",
    }
)
"""Operations whose rules know `Bits` themselves, or only pass values on."""


def apply_to_bits(machine: Machine, op: Op, operands: list[RuntimeValue], active: Active) -> list[RuntimeValue]:
    """Run an operation some of whose operands are `Bits`."""
    if op.name in _TAKES_BITS:
        return list(RULES[op.name](machine, op, operands, active))
    patterns = [value.pattern if isinstance(value, Bits) else value for value in operands]
    results = _plain(machine, op, patterns, active)
    if op.name in _KEEPS_FIRST:
        elements = [_identity(operands[0])]
    elif op.name == "arith.andi":
        carrier, other = operands if isinstance(operands[0], Bits) else operands[::-1]
        mask = other.pattern if isinstance(other, Bits) else other
        elements = [torch.where(mask == 0, 0, _identity(carrier))]
    elif op.name in _MOVES:
        fixed = {"arith.select": 0, "tt.gather": 1}.get(op.name)
        ids = [value if place == fixed else _identity(value) for place, value in enumerate(operands)]
        elements = _plain(machine, op, ids, active)
    else:
        return results
    return [Bits(*torch.broadcast_tensors(result, element)) for result, element in zip(results, elements, strict=True)]


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
