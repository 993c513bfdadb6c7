"""Constants, ranges, and operations that only move elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.memory import CPU
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import Active, BlockPointer, Pointer, RuntimeValue, expand_tile, same_programs

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


def on_offsets(value: RuntimeValue, change: Callable[[Tensor], Tensor]) -> RuntimeValue:
    """Apply a change of layout to a tensor, or to the offsets of pointers."""
    return value.map(change) if isinstance(value, Pointer) else change(value)


@rule("arith.constant")
def _constant(machine: Machine, op: Op, __: list[Any], ___: Active) -> list[Tensor]:
    type_ = op.results[0].type
    value = op.attributes["value"]
    data = value.data if isinstance(value, Dense) else value
    if isinstance(data, tuple):
        return [torch.tensor(data, dtype=type_.dtype, device=CPU).to(machine.device).view(1, *type_.tile)]
    return [_full(data, type_.dtype, len(type_.tile))]


def _full(data: bool | int | float, dtype: torch.dtype, rank: int) -> Tensor:
    """One number, held by the host."""
    if dtype == torch.bool:
        data = bool(data)
    return torch.full((1,) * (rank + 1), data, dtype=dtype, device=CPU)


@rule("ub.poison")
def _poison(_: Machine, op: Op, __: list[Any], ___: Active) -> list[RuntimeValue]:
    """A variable without a value on this path: zero, where nothing is promised."""
    type_ = op.results[0].type
    if type_.scalar.kind is Kind.POINTER:
        return [Pointer(None, _full(0, torch.int64, len(type_.tile)))]
    return [_full(0, type_.dtype, len(type_.tile))]


@rule("tt.make_range")
def _range(machine: Machine, op: Op, __: list[Any], ___: Active) -> list[Tensor]:
    start, end = op.attributes["start"], op.attributes["end"]
    return [torch.arange(start, end, dtype=torch.int32, device=machine.device).view(1, -1)]


@rule("tt.get_program_id")
def _program_id(machine: Machine, op: Op, _: list[Any], active: Active) -> list[Tensor]:
    axis, (x, y, _z) = op.attributes["axis"], machine.grid
    if machine.grid[axis] == 1:
        return [_full(0, torch.int32, 0)]
    ids = active.ids
    along = (ids % x, ids.div(x, rounding_mode="floor") % y, ids.div(x * y, rounding_mode="floor"))[axis]
    return [along.to(torch.int32)]


@rule("tt.get_num_programs")
def _program_count(machine: Machine, op: Op, _: list[Any], __: Active) -> list[Tensor]:
    return [_full(machine.grid[op.attributes["axis"]], torch.int32, 0)]


@rule("tt.splat")
def _splat(_: Machine, op: Op, operands: list[Any], __: Active) -> list[RuntimeValue]:
    rank = len(op.results[0].type.tile)
    return [on_offsets(operands[0], lambda value: value.reshape(-1, *[1] * rank))]


@rule("tt.unsplat")
def _unsplat(_: Machine, __: Op, operands: list[Any], ___: Active) -> list[RuntimeValue]:
    return [on_offsets(operands[0], lambda value: value.reshape(value.size(0)))]


@rule("tt.expand_dims")
def _expand_dims(_: Machine, op: Op, operands: list[Any], __: Active) -> list[RuntimeValue]:
    return [on_offsets(operands[0], lambda value: value.unsqueeze(op.attributes["axis"] + 1))]


@rule("tt.broadcast", "ttg.convert_layout")
def _broadcast(_: Machine, __: Op, operands: list[Any], ___: Active) -> list[RuntimeValue]:
    return operands


@rule("tt.reshape")
def _reshape(_: Machine, op: Op, operands: list[Any], __: Active) -> list[RuntimeValue]:
    before, after = op.operands[0].type.tile, op.results[0].type.tile

    def change(value: Tensor) -> Tensor:
        if value[0].numel() == 1:
            return value.reshape(-1, *[1] * len(after))
        return expand_tile(value, before).reshape(value.size(0), *after)

    return [on_offsets(operands[0], change)]


@rule("tt.trans")
def _transpose(_: Machine, op: Op, operands: list[Any], __: Active) -> list[RuntimeValue]:
    order = [axis + 1 for axis in op.attributes["order"]]
    return [on_offsets(operands[0], lambda value: value.permute(0, *order))]


def _whole(op: Op, operands: list[Any]) -> list[Tensor]:
    """Operands with full tiles and one program dimension."""
    return same_programs(
        [expand_tile(value, operand.type.tile) for value, operand in zip(operands, op.operands, strict=True)]
    )


@rule("tt.join")
def _join(_: Machine, op: Op, operands: list[Any], __: Active) -> list[Tensor]:
    return [torch.stack(_whole(op, operands), -1)]


@rule("tt.cat")
def _cat(_: Machine, op: Op, operands: list[Any], __: Active) -> list[Tensor]:
    return [torch.cat(_whole(op, operands), 1)]


@rule("tt.split")
def _split(_: Machine, op: Op, operands: list[Any], __: Active) -> list[Tensor]:
    (value,) = _whole(op, operands)
    return [value[..., 0], value[..., 1]]


@rule("tt.gather")
def _gather(_: Machine, op: Op, operands: list[Any], __: Active) -> list[Tensor]:
    source, index = _whole(op, operands)
    return [source.gather(op.attributes["axis"] + 1, index.to(torch.int64))]


@rule("tt.histogram")
def _histogram(_: Machine, op: Op, operands: list[Any], __: Active) -> list[Tensor]:
    whole = _whole(op, operands)
    bins = op.results[0].type.tile[0]
    inside = (whole[0] >= 0) & (whole[0] < bins)
    weight = (inside & whole[1] if len(whole) > 1 else inside).to(torch.int32)
    empty = weight.new_zeros(whole[0].size(0), bins)
    return [empty.scatter_add(1, whole[0].clamp(0, bins - 1).to(torch.int64), weight)]


@rule("arith.select")
def _select(_: Machine, __: Op, operands: list[Any], ___: Active) -> list[RuntimeValue]:
    return [_chosen(*operands)]


def _chosen(condition: Tensor, then: RuntimeValue, otherwise: RuntimeValue) -> RuntimeValue:
    """`then` where the condition holds; pointers into different buffers become addresses."""
    if isinstance(then, BlockPointer):
        extents, strides, offsets = (
            [_chosen(condition, yes, no) for yes, no in zip(*pair, strict=True)]
            for pair in (
                (then.extents, otherwise.extents),
                (then.strides, otherwise.strides),
                (then.offsets, otherwise.offsets),
            )
        )
        return BlockPointer(_chosen(condition, then.base, otherwise.base), extents, strides, offsets, then.pad_nan)
    if isinstance(then, Pointer):
        condition = _align(condition, then.offset)
        if then.buffer is otherwise.buffer:
            view = then.view if then.view is otherwise.view else None
            return Pointer(then.buffer, torch.where(condition, then.offset, otherwise.offset), view)
        return Pointer(None, torch.where(condition, then.address(), otherwise.address()))
    return torch.where(_align(condition, then), then, otherwise)


def _align(condition: Tensor, value: Tensor) -> Tensor:
    """A scalar condition chooses whole tiles."""
    return condition if condition.dim() == value.dim() else condition.view(-1, *[1] * (value.dim() - 1))
