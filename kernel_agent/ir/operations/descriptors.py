"""Atomic updates through tensor descriptors, and rows that a tile of indices names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.access import descriptor_target, load, store
from kernel_agent.ir.operations.atomics import OF_DESCRIPTORS, UNSIGNED, update_block
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Type
from kernel_agent.ir.values import Active, BlockPointer, Pointer, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


@rule("tt.descriptor_reduce")
def _reduce(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    block, value, *offsets = operands
    kind = OF_DESCRIPTORS.get(op.attributes["kind"])
    if kind is None:
        raise machine.unsupported(
            op, f"kind {op.attributes['kind']} of an update through a descriptor is not supported"
        )
    if op.operands[0].type.scalar.name.startswith("u"):
        kind = UNSIGNED.get(kind, kind)
    pointer, mask, type_ = descriptor_target(block, offsets, op.operands[1].type)
    extra = len(type_.shape) - len(op.operands[1].type.tile)
    value = value.reshape(value.size(0), *[1] * extra, *value.shape[1:])
    update_block(machine, op, kind, pointer, mask, value, type_, active)
    return []


def _rows(block: BlockPointer, rows: Tensor, column: Tensor, type_: Type) -> tuple[Pointer, Tensor]:
    """Pointers (P, n, width) to `width` elements from `column` (P,) on in each of `rows` (P, n); what lies inside."""
    width = type_.tile[1]
    row = rows.to(torch.int64).unsqueeze(-1)
    along = column.to(torch.int64).view(-1, 1, 1) + torch.arange(width, device=column.device)
    (row_stride, column_stride), (height, length) = (
        [part.view(-1, 1, 1) for part in parts] for parts in (block.strides, block.extents)
    )
    offset = block.base.offset.view(-1, 1, 1) + row * row_stride + along * column_stride
    inside = (row >= 0) & (row < height) & (along >= 0) & (along < length)
    return Pointer(block.base.buffer, offset, block.base.view), inside


@rule("tt.descriptor_gather")
def _gather(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    block, rows, column = operands
    type_ = op.results[0].type
    pointer, inside = _rows(block, rows, column, type_)
    return [load(machine, op, pointer, inside, None, type_, active)]


@rule("tt.descriptor_scatter")
def _scatter(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    block, rows, column, value = operands
    type_ = op.operands[3].type
    pointer, inside = _rows(block, rows, column, type_)
    store(machine, op, pointer, value, inside, type_, active)
    return []
