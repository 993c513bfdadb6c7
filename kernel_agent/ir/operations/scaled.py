"""Matrix products of microscaled formats: blocks of elements along k share a scale.

Formats of elements and of e8m0 scales are those of the OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import Active, expand_tile

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


class Format(enum.IntEnum):
    """Formats of elements, numbered as in the IR."""

    E4M3 = 0
    E5M2 = 1
    E2M3 = 2
    E3M2 = 3
    E2M1 = 4
    BF16 = 5
    FP16 = 6


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the four-bit format; the top bit is the sign."""
_E8M0_BIAS, _E8M0_NAN = 127, 255


@rule("tt.dot_scaled")
def _dot_scaled(machine: Machine, op: Op, operands: list[Any], __: Active) -> list[Tensor]:
    """(a * scale of a) @ (b * scale of b) + c, all exact. Scales are [m, k / block] and [n, k / block]."""
    given = [
        (expand_tile(value, operand.type.tile), operand.type)
        for value, operand in zip(operands, op.operands, strict=True)
    ]
    a, b, (accumulator, _), *scales = given
    *_, scaled_left, scaled_right = op.attributes["operandSegmentSizes"]
    first = _elements(machine, op, a, Format(op.attributes["a_elem_type"]), -1 if op.attributes["lhs_k_pack"] else -2)
    second = _elements(machine, op, b, Format(op.attributes["b_elem_type"]), -2 if op.attributes["rhs_k_pack"] else -1)
    if scaled_left:
        first = first * _scale(machine, op, scales[0], first.size(-1))
    if scaled_right:
        second = second * _scale(machine, op, scales[-1], second.size(-2)).transpose(-1, -2)
    return [torch.matmul(first, second) + accumulator]


def _elements(machine: Machine, op: Op, given: tuple[Tensor, Type], kind: Format, packed: int) -> Tensor:
    """Operand as float64; two e2m1 share a byte, the lower half first, along the dimension `packed`."""
    value, type_ = given
    if type_.scalar.kind is Kind.FLOAT:
        return value
    if kind is not Format.E2M1:
        raise machine.unsupported(
            op, f"a scaled product of {kind.name} elements in {type_.scalar.name} is not supported"
        )
    table = torch.tensor([*_E2M1, *(-size for size in _E2M1)], dtype=torch.float64, device="cpu").to(value.device)
    byte = value.to(torch.int64) & 0xFF
    pair = torch.stack([table[byte & 15], table[byte >> 4]], -1)
    dim = packed + value.dim()
    return pair.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _scale(machine: Machine, op: Op, given: tuple[Tensor, Type], length: int) -> Tensor:
    """Scales repeated over their blocks, [..., rows, length]. Bytes are e8m0: powers of two, 255 is NaN."""
    value, type_ = given
    if type_.scalar.kind is not Kind.FLOAT:
        if type_.bits != 8:
            raise machine.unsupported(op, f"scales of type {type_.scalar.name} are not supported")
        exponent = value.to(torch.int64) & 0xFF
        power = torch.exp2((exponent - _E8M0_BIAS).to(torch.float64))
        value = torch.where(exponent == _E8M0_NAN, torch.nan, power)
    return value.repeat_interleave(length // value.size(-1), -1)
