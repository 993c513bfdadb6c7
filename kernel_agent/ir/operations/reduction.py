"""Matrix products, reductions and scans. Known combines use one torch call; any other runs its region in a tree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Active, expand_tile, same_programs

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


@rule("tt.dot")
def _dot(_: Machine, op: Op, operands: list[Any], __: Active) -> list[Tensor]:
    a, b, accumulator = [
        expand_tile(value, operand.type.tile) for value, operand in zip(operands, op.operands, strict=True)
    ]
    if not a.is_floating_point():
        # 8-bit products summed in float64 are exact, and int32 has no fast matmul
        product = torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int64)
        return [product.to(accumulator.dtype) + accumulator]
    return [torch.matmul(a, b) + accumulator]


_ROUNDING = frozenset({"arith.addf", "arith.mulf"})
"""Combines whose every step rounds when arithmetic is faithful."""


def _combine(op: Op) -> str:
    """Name of the operation when the combine region is one plain operation on its two arguments, else empty."""
    block = op.regions[0][0]
    if len(block.ops) != 2 or len(block.arguments) != 2:
        return ""
    first, last = block.ops
    plain = {value.id for value in first.operands} == {value.id for value in block.arguments}
    return first.name if plain and last.operands[0] is first.results[0] else ""


def _whole(op: Op, operands: list[Any]) -> list[Tensor]:
    return same_programs(
        [expand_tile(value, operand.type.tile) for value, operand in zip(operands, op.operands, strict=True)]
    )


@rule("tt.reduce")
def _reduce(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    axis = op.attributes["axis"] + 1
    name = "" if machine.faithful and _combine(op) in _ROUNDING else _combine(op)
    tile = op.operands[0].type.tile
    if name in ("arith.addf", "arith.addi") and operands[0].dtype != torch.bool:
        return [expand_tile(operands[0], tile).sum(axis, dtype=operands[0].dtype)]
    if name in ("arith.maximumf", "arith.maxsi"):
        return [expand_tile(operands[0], tile).amax(axis)]
    if name in ("arith.minimumf", "arith.minsi"):
        return [expand_tile(operands[0], tile).amin(axis)]
    if name in ("arith.maxnumf", "arith.minnumf"):
        return [_extreme(expand_tile(operands[0], tile), axis, largest=name == "arith.maxnumf")]
    if name == "arith.mulf":
        return [expand_tile(operands[0], tile).prod(axis)]
    values = _whole(op, operands)
    rank = values[0].dim() - 1
    while values[0].size(axis) > 1:
        # neighbours are combined, so that the order of elements is kept for combines that do not commute
        pairs = [value.unflatten(axis, (-1, 2)) for value in values]
        left = [pair.select(axis + 1, 0) for pair in pairs]
        right = [pair.select(axis + 1, 1) for pair in pairs]
        merged = machine.run_lanes(op.regions[0][0], [*left, *right], active, rank)
        values = [value.expand(like.shape) for value, like in zip(merged, left, strict=True)]
    return [value.squeeze(axis) for value in values]


def _extreme(values: Tensor, axis: int, *, largest: bool) -> Tensor:
    """Maximum or minimum along an axis, of what is not NaN if anything; ties share the gradient evenly."""
    result = values.amax(axis) if largest else values.amin(axis)
    if not result.is_cuda and not bool(result.isnan().any()):
        return result
    bound = -math.inf if largest else math.inf
    missing = values.isnan()
    others = torch.where(missing, bound, values)
    return torch.where(missing.all(axis), math.nan, others.amax(axis) if largest else others.amin(axis))


@rule("tt.scan")
def _scan(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    axis = op.attributes["axis"] + 1
    values = _whole(op, operands)
    backwards = bool(op.attributes.get("reverse", False))
    if backwards:
        values = [value.flip(axis) for value in values]
    if _combine(op) in ("arith.addf", "arith.addi") and not (machine.faithful and values[0].is_floating_point()):
        values = [values[0].cumsum(axis, dtype=values[0].dtype)]
    else:
        values = _prefixes(machine, op, values, axis, active)
    return [value.flip(axis) for value in values] if backwards else values


def _prefixes(machine: Machine, op: Op, values: list[Tensor], axis: int, active: Active) -> list[Tensor]:
    """Inclusive scan by doubling: after step k every element covers 2**k elements."""
    length, rank, distance = values[0].size(axis), values[0].dim() - 1, 1
    while distance < length:
        left = [value.narrow(axis, 0, length - distance) for value in values]
        right = [value.narrow(axis, distance, length - distance) for value in values]
        merged = machine.run_lanes(op.regions[0][0], [*left, *right], active, rank)
        values = [
            torch.cat([value.narrow(axis, 0, distance), new.expand(like.shape)], axis)
            for value, new, like in zip(values, merged, right, strict=True)
        ]
        distance *= 2
    return values


@rule("tt.map_elementwise")
def _map(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[Tensor]:
    """The region takes `pack` neighbours of every operand, and passes on as many of every result."""
    pack = int(op.attributes.get("pack", 1))
    if pack == 1:
        return machine.run_lanes(op.regions[0][0], operands, active, operands[0].dim() - 1)
    parts = [part for value in _whole(op, operands) for part in value.unflatten(-1, (-1, pack)).unbind(-1)]
    like = parts[0].shape
    results = [value.expand(like) for value in machine.run_lanes(op.regions[0][0], parts, active, parts[0].dim() - 1)]
    return [torch.stack(results[k : k + pack], -1).flatten(-2) for k in range(0, len(results), pack)]
