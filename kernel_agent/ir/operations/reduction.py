"""Matrix products, reductions and scans. Known combines use one torch call; any other runs its region in a tree."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.extremes import extremum
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Active, Bits, RuntimeValue, expand_tile, mapped

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
    product = torch.matmul(a, b)
    return [product if _is_zero(operands[2]) else product + operands[2]]


def _is_zero(value: Tensor) -> bool:
    """Whether a value is known to be zero everywhere, without a look at more than one number."""
    return value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad and not bool(value)


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


def _plain(value: RuntimeValue) -> Tensor:
    return value.pattern if isinstance(value, Bits) else value


def _whole(op: Op, operands: list[RuntimeValue]) -> list[RuntimeValue]:
    """Operands with full tiles and one program dimension."""
    size = max(_plain(value).size(0) for value in operands)
    shapes = [(size, *operand.type.tile) for operand in op.operands]
    return [
        mapped(value, partial(torch.Tensor.expand, size=shape)) for value, shape in zip(operands, shapes, strict=True)
    ]


@rule("tt.reduce")
def _reduce(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    axis = op.attributes["axis"] + 1
    name = "" if isinstance(operands[0], Bits) or (machine.faithful and _combine(op) in _ROUNDING) else _combine(op)
    tile = op.operands[0].type.tile
    if name in ("arith.addf", "arith.addi") and operands[0].dtype != torch.bool:
        return [expand_tile(operands[0], tile).sum(axis, dtype=operands[0].dtype)]
    if name in ("arith.maximumf", "arith.maxsi"):
        return [extremum(expand_tile(operands[0], tile), axis, largest=True)]
    if name in ("arith.minimumf", "arith.minsi"):
        return [extremum(expand_tile(operands[0], tile), axis, largest=False)]
    if name in ("arith.maxnumf", "arith.minnumf"):
        return [_extreme(expand_tile(operands[0], tile), axis, largest=name == "arith.maxnumf")]
    if name == "arith.mulf":
        return [expand_tile(operands[0], tile).prod(axis)]
    values = _whole(op, operands)
    length = tile[axis - 1]
    shape = list(_plain(values[0]).shape)
    while length > 1:
        # neighbours are combined, so that the order of elements is kept for combines that do not commute
        length = shape[axis] = length // 2
        evens = [mapped(value, lambda part: part.unflatten(axis, (-1, 2)).select(axis + 1, 0)) for value in values]
        odds = [mapped(value, lambda part: part.unflatten(axis, (-1, 2)).select(axis + 1, 1)) for value in values]
        merged = machine.run_lanes(op.regions[0][0], [*evens, *odds], active, len(tile))
        values = [mapped(value, lambda part: part.expand(shape)) for value in merged]
    return [mapped(value, lambda part: part.squeeze(axis)) for value in values]


def _extreme(values: Tensor, axis: int, *, largest: bool) -> Tensor:
    """Maximum or minimum along an axis, of what is not NaN if anything; ties share the gradient evenly."""
    result = extremum(values, axis, largest=largest)
    if result.device.type == "cpu" and not bool(result.isnan().any()):  # a device is not asked
        return result
    bound = -math.inf if largest else math.inf
    missing = values.isnan()
    others = torch.where(missing, bound, values)
    return torch.where(missing.all(axis), math.nan, others.amax(axis) if largest else others.amin(axis))


@rule("tt.scan")
def _scan(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    axis = op.attributes["axis"] + 1
    values = _whole(op, operands)
    backwards = bool(op.attributes.get("reverse", False))
    if backwards:
        values = [mapped(value, lambda part: part.flip(axis)) for value in values]
    sums = _combine(op) in ("arith.addf", "arith.addi") and isinstance(values[0], Tensor)
    if sums and not (machine.faithful and values[0].is_floating_point()):
        values = [values[0].cumsum(axis, dtype=values[0].dtype)]
    else:
        values = _prefixes(machine, op, values, axis, active)
    return [mapped(value, lambda part: part.flip(axis)) for value in values] if backwards else values


def _prefixes(machine: Machine, op: Op, values: list[RuntimeValue], axis: int, active: Active) -> list[RuntimeValue]:
    """Inclusive scan by doubling: after step k every element covers 2**k elements."""
    shape = list(_plain(values[0]).shape)
    length, distance = shape[axis], 1
    while distance < length:
        left = [_part(value, axis, 0, length - distance) for value in values]
        right = [_part(value, axis, distance, length - distance) for value in values]
        merged = machine.run_lanes(op.regions[0][0], [*left, *right], active, len(shape) - 1)
        values = [_behind(value, new, axis, distance) for value, new in zip(values, merged, strict=True)]
        distance *= 2
    return values


def _part(value: RuntimeValue, axis: int, start: int, length: int) -> RuntimeValue:
    return mapped(value, lambda tensor: tensor.narrow(axis, start, length))


def _behind(old: RuntimeValue, new: RuntimeValue, axis: int, count: int) -> RuntimeValue:
    """The first `count` elements of `old` along an axis, then `new`."""
    if isinstance(old, Bits) or isinstance(new, Bits):
        first, second = (value if isinstance(value, Bits) else Bits.of(value) for value in (old, new))
        patterns, elements = (first.pattern, second.pattern), (first.element, second.element)
        return Bits(_behind(*patterns, axis, count), _behind(*elements, axis, count))
    shape = list(old.shape)
    shape[axis] -= count
    return torch.cat([old.narrow(axis, 0, count), new.expand(shape)], axis)


@rule("tt.map_elementwise")
def _map(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    """The region takes `pack` neighbours of every operand, and passes on as many of every result."""
    pack = int(op.attributes.get("pack", 1))
    if pack == 1:
        return machine.run_lanes(op.regions[0][0], operands, active, len(op.operands[0].type.tile))
    parts = [part for value in _whole(op, operands) for part in _plain(value).unflatten(-1, (-1, pack)).unbind(-1)]
    like = parts[0].shape
    results = [value.expand(like) for value in machine.run_lanes(op.regions[0][0], parts, active, parts[0].dim() - 1)]
    return [torch.stack(results[k : k + pack], -1).flatten(-2) for k in range(0, len(results), pack)]
