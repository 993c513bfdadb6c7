"""Loads and stores, by pointers and block pointers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.memory import Load, Store
from kernel_agent.ir.operations.pointers import PAD_NAN, Target, block_target, targets
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.operations.reinterpret import from_memory, gathered, inserted, pieces, size_of, to_memory
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import Active, Bits, BlockPointer, Pointer, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


def load(
    machine: Machine,
    op: Op,
    pointer: Pointer,
    mask: Tensor | None,
    other: RuntimeValue | None,
    type_: Type,
    active: Active,
) -> RuntimeValue:
    """Values of `type_` at the pointers. Lanes out of bounds read NaN (integers: 0), masked lanes `other` or zero.

    What a masked lane without `other` reads is undefined in Triton; on NVIDIA GPUs it is zero.
    """
    element = type_.scalar
    dtype = torch.int64 if element.kind is Kind.POINTER else element.dtype
    result = other
    for target in targets(machine, op, pointer, mask, active):
        inside = False
        if fits(machine, op, target, element):
            valid = _valid(machine, op, target, active, "load")
            inside = valid is target.mask and not machine.quiet  # in_bounds then knows that of all lanes
            if inside:
                valid = without_effect(valid)
            held = _gather(machine, op, target, valid, active, inside=inside)
            value = from_memory(machine, op, target.buffer, held, element)
        else:
            value, valid = _load_other_width(machine, op, target, element, active)
        if isinstance(value, Bits):
            result = value if valid is None else value.choose(valid, result)
            continue
        if valid is not None:
            if not inside and value.is_floating_point():
                outside = ~valid if target.mask is None else target.mask & ~valid
                value = torch.where(outside, math.nan, value)
                valid = outside | valid
            fill = value.new_zeros(()) if result is None else result
            value = Bits.of(value).choose(valid, fill) if isinstance(fill, Bits) else torch.where(valid, value, fill)
        result = value
    if result is None:
        result = torch.zeros((1,) * (len(type_.tile) + 1), dtype=dtype, device=machine.device)
    return Pointer(None, result) if element.kind is Kind.POINTER else result


def without_effect(mask: Tensor | None) -> Tensor | None:
    """None for a mask that is true everywhere. Asking costs little where no device has to answer."""
    return None if mask is not None and mask.device.type == "cpu" and bool(mask.all()) else mask


def fits(machine: Machine, op: Op, target: Target, element: Type) -> bool:
    """Whether elements are as wide as what the buffer holds. Raises `UnsupportedOp` where they are not aligned."""
    size = size_of(element)
    unit = min(size, target.buffer.itemsize)
    if target.byte is not None and unit > 1 and bool((target.byte % unit != 0).any()):
        raise machine.unsupported(op, f"access to {target.buffer.name} at an address that is no multiple of {unit}")
    return size == target.buffer.itemsize


def _valid(machine: Machine, op: Op, target: Target, active: Active, access: str) -> Tensor | None:
    return machine.sanitizer.in_bounds(target.buffer, target.offset, target.mask, op, active, access, target.view)


def _load_other_width(
    machine: Machine, op: Op, target: Target, element: Type, active: Active
) -> tuple[RuntimeValue, Tensor | None]:
    """Values, and which lanes have one."""
    kept = target.mask

    def read(step: int) -> Tensor:
        nonlocal kept
        part = target.further(step)
        valid = _valid(machine, op, part, active, "load")
        if valid is not None:
            kept = valid if kept is None else kept & valid
        return _gather(machine, op, part, valid, active, inside=False)

    value = gathered(machine, op, target.buffer, target.byte, element, read)
    return value, kept


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
        # one gather may serve lanes with different masks: its gradient is their sum already
        several = tuple(index.shape) != lanes.shape
        value, tape.token = Load.apply(tape.token, tape, index, None if machine.quiet or several else valid)
        return value
    return tape.contents.index_select(0, index.reshape(-1)).view(index.shape)


def store(
    machine: Machine, op: Op, pointer: Pointer, value: RuntimeValue, mask: Tensor | None, type_: Type, active: Active
) -> None:
    """Write `value` of `type_` at the pointers; lanes out of bounds are dropped."""
    if isinstance(value, Pointer):
        value = value.address()
    for target in targets(machine, op, pointer, mask, active):
        if fits(machine, op, target, type_.scalar):
            _put(machine, op, target, to_memory(machine, op, target.buffer, value, type_.scalar), active)
        elif size_of(type_.scalar) > target.buffer.itemsize:
            for step, part in enumerate(pieces(machine, op, target.buffer, value, type_.scalar)):
                _put(machine, op, target.further(step), part, active)
        else:
            _store_narrow(machine, op, target, value, type_.scalar, active)


def _put(machine: Machine, op: Op, target: Target, stored: Tensor, active: Active) -> None:
    buffer = target.buffer
    valid = _valid(machine, op, target, active, "store")
    if valid is target.mask:
        valid = without_effect(valid)
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


def _store_narrow(machine: Machine, op: Op, target: Target, value: RuntimeValue, element: Type, active: Active) -> None:
    """Several lanes may share an element, so each place in it has its turn. Races between them are not judged."""
    buffer, tape = target.buffer, machine.tape(target.buffer)
    valid = _valid(machine, op, target, active, "store")
    plain = value.pattern if isinstance(value, Bits) else value
    lanes = machine.lanes(buffer, target.offset, valid, active, target.view).broadcast(plain)
    if machine.meter is not None:
        machine.meter.access(Access.WRITE, op, buffer, lanes)
    byte = lanes.select(target.offset.new_zeros(()) if target.byte is None else target.byte)
    values = lanes.select(plain)
    for place in range(0, buffer.itemsize, size_of(element)):
        mine = byte == place
        index = lanes.index[mine]
        old = tape.contents.index_select(0, index)
        new = inserted(machine, op, buffer, old, values[mine], element, place)
        tape.put(index, new, tape.owners(index))
        if buffer.written is not None:
            buffer.written[index] = True


def padding(pointer: Pointer, type_: Type, *, nan: bool) -> Tensor | None:
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
        other = padding(pointer, type_, nan=op.attributes.get("padding") == PAD_NAN)
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
