"""Pointer arithmetic, block pointers and tensor descriptors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.memory import ADDRESS_BITS, Buffer
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.sanitizer.views import View
from kernel_agent.ir.types import Type
from kernel_agent.ir.values import Active, BlockPointer, Pointer, common_shape

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


@rule("tt.addptr")
def _add(_: Machine, op: Op, operands: list[Any], __: Active) -> list[Pointer]:
    pointer, offset = operands
    if offset.dtype != torch.int64:
        offset = offset.to(torch.int64)
    if pointer.buffer is None:
        pointee = op.results[0].type.scalar.element
        offset = offset * max(1, (pointee.bits if pointee else 8) // 8)
    return [Pointer(pointer.buffer, pointer.offset + offset, pointer.view)]


@rule("tt.int_to_ptr")
def _from_integer(_: Machine, __: Op, operands: list[Any], ___: Active) -> list[Pointer]:
    return [Pointer(None, operands[0].to(torch.int64))]


@rule("tt.ptr_to_int")
def _to_integer(_: Machine, __: Op, operands: list[Any], ___: Active) -> list[Tensor]:
    return [operands[0].address()]


PAD_NAN = 2
"""Value of the `padding` attribute that fills lanes outside with NaN instead of zero."""


@rule("tt.make_tensor_ptr")
def _make_block(_: Machine, __: Op, operands: list[Any], ___: Active) -> list[BlockPointer]:
    rank = (len(operands) - 1) // 3
    numbers = [value.to(torch.int64) for value in operands[1:]]
    return [BlockPointer(operands[0], numbers[:rank], numbers[rank : 2 * rank], numbers[2 * rank :])]


@rule("tt.make_tensor_descriptor")
def _make_descriptor(_: Machine, op: Op, operands: list[Any], ___: Active) -> list[BlockPointer]:
    rank = (len(operands) - 1) // 2
    numbers = [value.to(torch.int64) for value in operands[1:]]
    pad_nan = op.attributes.get("padding") == PAD_NAN
    return [BlockPointer(operands[0], numbers[:rank], numbers[rank:], [], pad_nan)]


@rule("tt.advance")
def _advance(_: Machine, __: Op, operands: list[Any], ___: Active) -> list[BlockPointer]:
    block, *steps = operands
    offsets = [offset + step.to(torch.int64) for offset, step in zip(block.offsets, steps, strict=True)]
    return [BlockPointer(block.base, block.extents, block.strides, offsets)]


@dataclass(frozen=True)
class Target:
    """Where an access goes: offsets into one buffer, and which lanes take part."""

    buffer: Buffer
    offset: Tensor
    mask: Tensor | None
    view: View | None = None
    """The argument that the pointer came from, where that is known."""
    byte: Tensor | None = None
    """Bytes from the start of the element; None when all are zero."""

    def further(self, elements: int) -> Target:
        """The same lanes some elements on."""
        return replace(self, offset=self.offset + elements)


def block_target(
    block: BlockPointer, offsets: list[Tensor], shape: tuple[int, ...], checked: Collection[int], element: Type
) -> tuple[Pointer, Tensor | None]:
    """Pointers of a block of the given shape, and a mask from the dimensions whose bounds are checked."""
    scale = 1 if block.base.buffer is not None else max(1, element.bits // 8)
    rank = len(shape)
    offset = block.base.offset.reshape(-1, *[1] * rank)
    mask: Tensor | None = None
    for dim, length in enumerate(shape):
        along = [1] * (rank + 1)
        along[dim + 1] = length
        place = offsets[dim].reshape(-1, *[1] * rank) + torch.arange(length, device=offset.device).view(along)
        offset = offset + place * (block.strides[dim].reshape(-1, *[1] * rank) * scale)
        if dim in checked:
            inside = (place >= 0) & (place < block.extents[dim].reshape(-1, *[1] * rank))
            mask = inside if mask is None else mask & inside
    return Pointer(block.base.buffer, offset, block.base.view), mask


def targets(machine: Machine, op: Op, pointer: Pointer, mask: Tensor | None, active: Active) -> list[Target]:
    """Resolve pointers to buffers. Only virtual addresses can reach more than one."""
    if pointer.buffer is not None:
        return [Target(pointer.buffer, pointer.offset, mask, pointer.view)]
    numbers = pointer.offset >> ADDRESS_BITS
    everywhere = numbers.new_ones((1,) * numbers.dim(), dtype=torch.bool) if mask is None else mask
    shape = common_shape(numbers.shape, everywhere.shape)
    found = []
    for number in numbers.expand(shape)[everywhere.expand(shape)].unique().cpu().tolist():
        buffer = machine.buffers.get(number)
        mine = (numbers == number) & everywhere
        if buffer is None:
            machine.sanitizer.wild(op, int(pointer.offset.expand(shape)[mine.expand(shape)][0]), active)
        else:
            place = torch.where(mine, pointer.offset - buffer.base, 0)
            byte = place % buffer.itemsize if buffer.itemsize > 1 else None
            element = place.div(buffer.itemsize, rounding_mode="floor")
            found.append(Target(buffer, element, mine, byte=byte))
    return found
