"""Loads and stores, by pointers, block pointers and tensor descriptors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.memory import Buffer, Load, Store
from kernel_agent.ir.meter import Access
from kernel_agent.ir.operations.bits import to_bits, to_floats
from kernel_agent.ir.operations.pointers import PAD_NAN, Target, block_target, targets
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import Active, Bits, BlockPointer, Pointer, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


def check_width(machine: Machine, op: Op, buffer: Buffer, element: Type) -> None:
    """A buffer may be read as another type of the same width, not of another width. Raises `UnsupportedOp`."""
    if element.kind in (Kind.INT, Kind.FLOAT) and max(element.bits, 8) != 8 * buffer.itemsize:
        declared = str(buffer.declared).removeprefix("torch.")
        raise machine.unsupported(op, f"reading {buffer.name} ({declared}) as {element.name} is not supported")


def load(
    machine: Machine,
    op: Op,
    pointer: Pointer,
    mask: Tensor | None,
    other: RuntimeValue | None,
    type_: Type,
    active: Active,
) -> RuntimeValue:
    """Values of `type_` at the pointers. Masked lanes read `other` or zero, lanes out of bounds NaN (integers: 0)."""
    element = type_.scalar
    dtype = torch.int64 if element.kind is Kind.POINTER else element.dtype
    result = other
    for target in targets(machine, op, pointer, mask, active):
        check_width(machine, op, target.buffer, element)
        valid = machine.sanitizer.in_bounds(target.buffer, target.offset, target.mask, op, active, "load", target.view)
        inside = valid is target.mask and not machine.quiet  # in_bounds then knows that of all lanes
        if inside:
            valid = without_effect(valid)
        value = _gather(machine, op, target, valid, active, inside=inside)
        if target.buffer.is_float and element.kind is Kind.INT:
            bits = to_bits(machine, value, element)
            result = bits if valid is None else bits.choose(valid, result)
            continue
        if not target.buffer.is_float and element.kind is Kind.FLOAT:
            value = to_floats(machine, value, element)
        value = value if value.dtype == dtype else value.to(dtype)
        if valid is not None:
            if not inside and value.is_floating_point():
                outside = ~valid if target.mask is None else target.mask & ~valid
                value = torch.where(outside, math.nan, value)
                valid = outside | valid
            fill = value.new_zeros(()) if result is None else result
            value = torch.where(valid, value, fill)
        result = value
    if result is None:
        result = torch.zeros((1,) * (len(type_.tile) + 1), dtype=dtype, device=machine.device)
    return Pointer(None, result) if element.kind is Kind.POINTER else result


def without_effect(mask: Tensor | None) -> Tensor | None:
    """None for a mask that is true everywhere. Asking costs little where no device has to answer."""
    return None if mask is not None and mask.device.type == "cpu" and bool(mask.all()) else mask


def _gather(machine: Machine, op: Op, target: Target, valid: Tensor | None, active: Active, *, inside: bool) -> Tensor:
    """What memory holds at the pointers; `inside` says that lanes that do not read point into the buffer too."""
    buffer, offset = target.buffer, target.offset
    tape = machine.tape(buffer)
    lanes = machine.lanes(buffer, offset, valid, active, target.view)
    machine.sanitizer.read(buffer, lanes, op)
    if machine.meter is not None:
        machine.meter.access(Access.READ, op, buffer, lanes)
    index = offset if inside else lanes.readable()
    if buffer.size == 0:
        return tape.contents.new_zeros(index.shape)
    if tape.records():
        value, tape.token = Load.apply(tape.token, tape, index, None if machine.quiet else valid)
        return value
    return tape.contents.index_select(0, index.reshape(-1)).view(index.shape)


def store(
    machine: Machine, op: Op, pointer: Pointer, value: RuntimeValue, mask: Tensor | None, type_: Type, active: Active
) -> None:
    """Write `value` of `type_` at the pointers; lanes out of bounds are dropped."""
    if isinstance(value, Pointer):
        value = value.address()
    for target in targets(machine, op, pointer, mask, active):
        buffer = target.buffer
        check_width(machine, op, buffer, type_.scalar)
        valid = machine.sanitizer.in_bounds(buffer, target.offset, target.mask, op, active, "store", target.view)
        if valid is target.mask:
            valid = without_effect(valid)
        stored = to_memory(machine, buffer, value, type_)
        lanes = machine.lanes(buffer, target.offset, valid, active, target.view).broadcast(stored)
        values = lanes.select(stored)
        if machine.meter is not None:
            machine.meter.access(Access.WRITE, op, buffer, lanes)
        tape = machine.tape(buffer)
        owner = tape.owners(lanes.index)
        machine.sanitizer.store(buffer, lanes, values, tape.contents, owner, op)
        if tape.records(values):
            tape.token = Store.apply(tape.token, values, tape, lanes.index, owner)
        else:
            tape.put(lanes.index, values, owner)


def to_memory(machine: Machine, buffer: Buffer, value: RuntimeValue, type_: Type) -> Tensor:
    """A value in the form the buffer holds: float bits become floats again, and the other way round."""
    if buffer.is_float and type_.scalar.kind is Kind.INT:
        name = {16: "bf16" if buffer.declared == torch.bfloat16 else "f16", 32: "f32", 64: "f64"}[type_.bits]
        return to_floats(machine, value, Type(Kind.FLOAT, name))
    if not buffer.is_float and type_.scalar.kind is Kind.FLOAT:
        value = to_bits(machine, value, type_.scalar)
    plain = value.pattern if isinstance(value, Bits) else value
    return plain.to(buffer.root.dtype)


def _outside(pointer: Pointer, type_: Type, *, nan: bool) -> Tensor | None:
    """What lanes outside of a block get: None for zero."""
    pads = nan and type_.scalar.kind is Kind.FLOAT
    return pointer.offset.new_full((), math.nan, dtype=type_.dtype) if pads else None


@rule("tt.load")
def _load(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    type_ = op.results[0].type
    if isinstance(operands[0], BlockPointer):
        block = operands[0]
        pointer, mask = block_target(
            block, block.offsets, type_.tile, op.attributes.get("boundaryCheck", ()), type_.scalar
        )
        other = _outside(pointer, type_, nan=op.attributes.get("padding") == PAD_NAN)
        return [load(machine, op, pointer, mask, other, type_, active)]
    _, has_mask, has_other = op.attributes.get("operandSegmentSizes", (1, len(operands) > 1, len(operands) > 2))
    mask = operands[1] if has_mask else None
    other = operands[1 + has_mask] if has_other else None
    return [load(machine, op, operands[0], mask, other, type_, active)]


@rule("tt.store")
def _store(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    type_ = op.operands[1].type
    if isinstance(operands[0], BlockPointer):
        block = operands[0]
        pointer, mask = block_target(
            block, block.offsets, type_.tile, op.attributes.get("boundaryCheck", ()), type_.scalar
        )
    else:
        pointer, mask = operands[0], operands[2] if len(operands) > 2 else None
    store(machine, op, pointer, operands[1], mask, type_, active)
    return []


def descriptor_target(block: BlockPointer, offsets: list[Tensor], type_: Type) -> tuple[Pointer, Tensor | None, Type]:
    """A descriptor may have more dimensions than the tile: leading ones of length 1. All bounds are checked."""
    shape = (1,) * (len(block.extents) - len(type_.tile)) + type_.tile
    starts = [offset.to(torch.int64) for offset in offsets]
    pointer, mask = block_target(block, starts, shape, range(len(shape)), type_.scalar)
    return pointer, mask, Type(Kind.TENSOR, type_.name, shape, type_.element)


@rule("tt.descriptor_load")
def _descriptor_load(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    type_ = op.results[0].type
    pointer, mask, block = descriptor_target(operands[0], operands[1:], type_)
    value = load(machine, op, pointer, mask, _outside(pointer, type_, nan=operands[0].pad_nan), block, active)
    extra = len(block.shape) - len(type_.tile)
    return [value.reshape(value.size(0), *value.shape[1 + extra :])]


@rule("tt.descriptor_store")
def _descriptor_store(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    block, value, *offsets = operands
    type_ = op.operands[1].type
    pointer, mask, target = descriptor_target(block, offsets, type_)
    extra = len(target.shape) - len(type_.tile)
    value = value.reshape(value.size(0), *[1] * extra, *value.shape[1:])
    store(machine, op, pointer, value, mask, target, active)
    return []
