"""Accesses by tensor descriptors: blocks, rows picked one by one, and atomic updates. All bounds are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.access import load, padding, store
from kernel_agent.ir.operations.atomics import OF_DESCRIPTORS, Update, update_at
from kernel_agent.ir.operations.pointers import block_target
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import Active, BlockPointer, Pointer, RuntimeValue, mapped

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


def _block(block: BlockPointer, offsets: list[Tensor], type_: Type) -> tuple[Pointer, Tensor | None, Type]:
    """A descriptor may have more dimensions than the tile: leading ones of length 1."""
    shape = (1,) * (len(block.extents) - len(type_.tile)) + type_.tile
    starts = [offset.to(torch.int64) for offset in offsets]
    pointer, mask = block_target(block, starts, shape, range(len(shape)), type_.scalar)
    return pointer, mask, Type(Kind.TENSOR, type_.name, shape, type_.element)


def _with_leading(value: RuntimeValue, type_: Type, block: Type) -> RuntimeValue:
    """A tile in the shape of the descriptor's block."""
    extra = [1] * (len(block.shape) - len(type_.tile))
    return mapped(value, lambda part: part.reshape(part.size(0), *extra, *part.shape[1:]))


@rule("tt.descriptor_load")
def _load(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    type_ = op.results[0].type
    pointer, mask, block = _block(operands[0], operands[1:], type_)
    value = load(machine, op, pointer, mask, padding(pointer, type_, nan=operands[0].pad_nan), block, active)
    extra = len(block.shape) - len(type_.tile)
    return [mapped(value, lambda part: part.reshape(part.size(0), *part.shape[1 + extra :]))]


@rule("tt.descriptor_store")
def _store(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    descriptor, value, *offsets = operands
    type_ = op.operands[1].type
    pointer, mask, block = _block(descriptor, offsets, type_)
    store(machine, op, pointer, _with_leading(value, type_, block), mask, block, active)
    return []


def _rows(block: BlockPointer, rows: Tensor, start: Tensor, type_: Type) -> tuple[Pointer, Tensor]:
    """Pointers to parts of the given rows of a matrix, from column `start` on."""
    count, width = type_.tile
    scale = 1 if block.base.buffer is not None else max(1, type_.bits // 8)
    row = rows.to(torch.int64).expand(-1, count).unsqueeze(-1)
    column = start.to(torch.int64).view(-1, 1, 1) + torch.arange(width, device=rows.device)
    down, right = (stride.view(-1, 1, 1) * scale for stride in block.strides)
    height, length = (extent.view(-1, 1, 1) for extent in block.extents)
    offset = block.base.offset.view(-1, 1, 1) + row * down + column * right
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < length)
    return Pointer(block.base.buffer, offset, block.base.view), inside


@rule("tt.descriptor_gather")
def _gather(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    descriptor, rows, start = operands
    type_ = op.results[0].type
    pointer, mask = _rows(descriptor, rows, start, type_)
    return [load(machine, op, pointer, mask, padding(pointer, type_, nan=descriptor.pad_nan), type_, active)]


@rule("tt.descriptor_scatter")
def _scatter(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    descriptor, rows, start, value = operands
    type_ = op.operands[3].type
    pointer, mask = _rows(descriptor, rows, start, type_)
    store(machine, op, pointer, value, mask, type_, active)
    return []


_UNSIGNED = {Update.MIN: Update.UMIN, Update.MAX: Update.UMAX}


@rule("tt.descriptor_reduce")
def _reduce(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    descriptor, value, *offsets = operands
    type_ = op.operands[1].type
    update = OF_DESCRIPTORS.get(op.attributes["kind"])
    if update is None:
        raise machine.unsupported(op, f"descriptor update {op.attributes['kind']} is not supported")
    element = op.operands[0].type.element
    if element is not None and element.name.startswith("u"):
        update = _UNSIGNED.get(update, update)
    pointer, mask, block = _block(descriptor, offsets, type_)
    whole = _with_leading(value, type_, block)
    update_at(machine, op, pointer, whole, mask, block.scalar, update, active)
    return []
