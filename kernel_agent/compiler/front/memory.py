"""Loads, stores and atomics: by pointers, block pointers and tensor descriptors, all as offsets with masks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from kernel_agent.compiler.front import library
from kernel_agent.compiler.front.items import Blocked, Form, Item, Pointer
from kernel_agent.compiler.front.offsets import at_least_zero, narrowed, plus, product
from kernel_agent.compiler.front.reader import Reader, element_of, reads
from kernel_agent.compiler.ssa.code import BY_DESCRIPTOR, BY_POINTER, Code
from kernel_agent.compiler.ssa.value import Op as Made
from kernel_agent.compiler.ssa.value import Value, broadcast_shape, constant
from kernel_agent.ir.operations.atomics import OF_DESCRIPTORS, Update
from kernel_agent.ir.operations.pointers import PAD_NAN
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Type

# --- addresses


@reads("tt.addptr")
def _add(reader: Reader, op: Op, operands: list[Any]) -> Pointer:
    pointer, offset = operands
    _known(reader, op, pointer)
    assert isinstance(pointer, Pointer)
    return replace(pointer, offset=plus(reader.builder, pointer.offset, offset))


@reads("tt.int_to_ptr", "tt.ptr_to_int")
def _integer(reader: Reader, op: Op, _: list[Any]) -> Item:
    raise reader.refuse(
        op, "an address is computed as a number", "Pass the tensor itself, or one tensor that holds all of them."
    )


def _known(reader: Reader, op: Op, item: Item) -> None:
    """Raises CannotDerive for an address that comes from memory."""
    if not isinstance(item, (Pointer, Blocked)):
        raise reader.refuse(
            op, "a pointer is read from memory", "Pass the tensor itself, or one tensor that holds all of them."
        )


@reads("tt.make_tensor_ptr")
def _make_block(reader: Reader, _: Op, operands: list[Any]) -> Blocked:
    pointer, *numbers = operands
    rank = len(numbers) // 3
    form = Form(BY_POINTER, reader.builder.hint)
    groups = (tuple(numbers[:rank]), tuple(numbers[rank : 2 * rank]), tuple(numbers[2 * rank :]))
    return Blocked(pointer, form, *groups)


@reads("tt.make_tensor_descriptor")
def _make_descriptor(reader: Reader, op: Op, operands: list[Any]) -> Blocked:
    pointer, *numbers = operands
    rank = len(numbers) // 2
    form = Form(BY_DESCRIPTOR, reader.builder.hint)
    pad_nan = op.attributes.get("padding") == PAD_NAN
    return Blocked(pointer, form, tuple(numbers[:rank]), tuple(numbers[rank:]), (), pad_nan)


@reads("tt.advance")
def _advance(reader: Reader, _: Op, operands: list[Any]) -> Blocked:
    block, *steps = operands
    assert isinstance(block, Blocked)
    moved = [plus(reader.builder, offset, step) for offset, step in zip(block.offsets, steps, strict=True)]
    return replace(block, offsets=tuple(moved))


def _block(
    reader: Reader, op: Op, block: Blocked, starts: Sequence[Value], shape: tuple[int, ...], checked: Collection[int]
) -> tuple[Pointer, Value | None]:
    """Where a tile of `shape` lies, and which of its elements are inside of the tensor in the `checked` dimensions.

    The shape has as many dimensions as the block; leading ones of extent 1 are no dimensions of the result. Nothing of
    it has the name of what is loaded.
    """
    builder = reader.builder
    hint, builder.hint = builder.hint, ""
    leading = 0
    while leading < len(shape) - 1 and shape[leading] == 1 and len(shape) - leading > _rank(op):
        leading += 1
    offset, mask = block.pointer.offset, None
    for dim, extent in enumerate(shape):
        place = starts[dim]
        if dim >= leading:
            lane = builder.arange(0, extent, reader.symbols.get((id(op), -2 - dim)))
            place = plus(builder, place, lane)
            for axis in range(len(shape) - leading):
                if axis != dim - leading:
                    place = builder.expand(place, axis)
        offset = plus(builder, offset, product(builder, place, block.strides[dim]))
        if dim not in checked:
            continue
        limit = narrowed(builder, block.extents[dim])
        low, high = (
            (limit, place) if limit.element == place.element else (block.extents[dim], builder.cast(place, "i64"))
        )
        inside = builder.compare("lt", high, low)
        if not at_least_zero(place, reader.at_least_zero):
            inside = builder.logical_and(builder.compare("ge", place, builder.zero(place)), inside)
        mask = inside if mask is None else builder.logical_and(mask, inside)
    builder.hint = hint
    return replace(block.pointer, offset=offset), mask


def _rank(op: Op) -> int:
    """Of the tile that an access moves."""
    type_ = op.results[0].type if op.results else op.operands[1].type
    return len(type_.tile)


# --- loads


def _load(
    reader: Reader, op: Op, pointer: Pointer, mask: Value | None, other: Value | None, form: Form | None = None
) -> Value:
    builder, type_ = reader.builder, op.results[0].type
    reader.loaded.add(pointer.base.name)
    element = pointer.base.pointee
    if element.startswith("*"):
        _known(reader, op, mask or builder.const(0))
    if mask is not None and constant(mask) is True:
        mask = other = None
    elif other is not None:
        other = _as_held(reader, other, element)
    shapes = [value.shape for value in (pointer.offset, mask, other) if value is not None]
    offset = builder.whole(pointer.offset, broadcast_shape(shapes))
    value = builder.load(pointer.base, offset, mask, other, **_hints(form))
    return _as_read(reader, value, element_of(type_))


def _as_read(reader: Reader, value: Value, element: str) -> Value:
    """What memory holds as the element that the kernel reads. Conditions are read as bytes."""
    if {value.element, element} == {"i1", "i8"}:
        return reader.builder.cast(value, element)
    return library.bitcast(reader.builder, value, element)


def _as_held(reader: Reader, value: Value, element: str) -> Value:
    """The reverse of `_as_read`."""
    builder = reader.builder
    if element != "i1" or value.element == "i1":
        return _as_read(reader, value, element)
    made = value.producer
    if made is not None and made.code is Code.CAST and made.operands[0].element == "i1":
        return made.operands[0]
    return builder.compare("ne", value, builder.zero(value))


@reads("tt.load")
def _read(reader: Reader, op: Op, operands: list[Any]) -> Value:
    _known(reader, op, operands[0])
    type_ = op.results[0].type
    if isinstance(operands[0], Blocked):
        block = operands[0]
        pointer, inside = _block(reader, op, block, block.offsets, type_.tile, op.attributes.get("boundaryCheck", ()))
        padding = _padding(reader, inside, pointer, op.attributes.get("padding"))
        return _load(reader, op, pointer, inside, padding, block.form)
    _, has_mask, has_other = op.attributes.get("operandSegmentSizes", (1, len(operands) > 1, len(operands) > 2))
    mask = operands[1] if has_mask else None
    return _load(reader, op, operands[0], mask, operands[1 + has_mask] if has_other else None)


def _padding(reader: Reader, mask: Value | None, pointer: Pointer, padding: object) -> Value | None:
    """What elements outside of a block read: zero, where nothing else is said."""
    if mask is None:
        return None
    element = pointer.element
    if element[0] != "i":
        return reader.builder.const(math.nan if padding == PAD_NAN else 0.0, element)
    return reader.builder.const(False if element == "i1" else 0, element)


@reads("tt.descriptor_load")
def _read_block(reader: Reader, op: Op, operands: list[Any]) -> Value:
    block, *starts = operands
    pointer, mask = _block(reader, op, block, starts, _block_shape(block, op.results[0].type), range(len(starts)))
    padding = _padding(reader, mask, pointer, PAD_NAN if block.pad_nan else None)
    return _load(reader, op, pointer, mask, padding, block.form)


def _block_shape(block: Blocked, type_: Type) -> tuple[int, ...]:
    """A descriptor may have more dimensions than the tile: leading ones of extent 1."""
    return (1,) * (len(block.extents) - len(type_.tile)) + type_.tile


@reads("tt.descriptor_gather")
def _read_rows(reader: Reader, op: Op, operands: list[Any]) -> Value:
    block, rows, start = operands
    pointer, mask = _rows(reader, block, rows, start, op.results[0].type)
    return _load(reader, op, pointer, mask, _padding(reader, mask, pointer, PAD_NAN if block.pad_nan else None))


def _rows(reader: Reader, block: Blocked, rows: Value, start: Value, type_: Type) -> tuple[Pointer, Value]:
    """Parts of the given rows of a matrix, from column `start` on."""
    builder = reader.builder
    row = builder.expand(rows, 1)
    column = builder.expand(plus(builder, start, builder.arange(0, type_.tile[1])), 0)
    offset, mask = block.pointer.offset, builder.const(True, "i1")
    for place, stride, extent in zip((row, column), block.strides, block.extents, strict=True):
        offset = plus(builder, offset, product(builder, place, stride))
        limit = narrowed(builder, extent)
        inside = builder.compare("lt", builder.cast(place, limit.element), limit)
        inside = builder.logical_and(builder.compare("ge", place, builder.zero(place)), inside)
        mask = builder.logical_and(mask, inside)
    return replace(block.pointer, offset=offset), mask


# --- stores


def _store(reader: Reader, pointer: Pointer, value: Value, mask: Value | None, form: Form | None = None) -> None:
    reader.stored.add(pointer.base.name)
    reader.effects = True
    mask = None if mask is not None and constant(mask) is True else mask
    held = _as_held(reader, value, pointer.base.pointee)
    reader.builder.store(pointer.base, pointer.offset, held, mask, Code.STORE, **_hints(form))


def _hints(form: Form | None) -> dict[str, str]:
    """What an access remembers of how the source says it."""
    return {} if form is None else {"form": form.kind, "handle": form.name}


@reads("tt.store")
def _write(reader: Reader, op: Op, operands: list[Any]) -> None:
    _known(reader, op, operands[0])
    if not isinstance(operands[1], Value):
        raise reader.refuse(op, "a pointer is stored", "Store an offset.")
    if isinstance(operands[0], Blocked):
        block, value = operands
        checked = op.attributes.get("boundaryCheck", ())
        pointer, mask = _block(reader, op, block, block.offsets, op.operands[1].type.tile, checked)
        _store(reader, pointer, value, mask, block.form)
    else:
        _store(reader, operands[0], operands[1], operands[2] if len(operands) > 2 else None)


@reads("tt.descriptor_store")
def _write_block(reader: Reader, op: Op, operands: list[Any]) -> None:
    block, value, *starts = operands
    pointer, mask = _block(reader, op, block, starts, _block_shape(block, op.operands[1].type), range(len(starts)))
    _store(reader, pointer, value, mask, block.form)


@reads("tt.descriptor_scatter")
def _write_rows(reader: Reader, op: Op, operands: list[Any]) -> None:
    block, rows, start, value = operands
    pointer, mask = _rows(reader, block, rows, start, op.operands[3].type)
    _store(reader, pointer, value, mask)


# --- atomics

_NAMES = {Update.AND: "and", Update.OR: "or", Update.XOR: "xor", Update.ADD: "add", Update.FADD: "add",
          Update.MAX: "max", Update.MIN: "min", Update.UMAX: "umax", Update.UMIN: "umin",
          Update.EXCHANGE: "xchg"}  # fmt: skip
_OF_BITS = {"max": "max", "min": "min", "umax": "min", "umin": "max"}
"""Triton updates extremes of floats as integers: positive ones signed, negative ones unsigned and so reversed."""


def _update(
    reader: Reader, op: Op, pointer: Pointer, value: Value, mask: Value | None, name: str, type_: Type
) -> Sequence[Item]:
    builder, base = reader.builder, pointer.base
    reader.stored.add(base.name)
    reader.effects = True
    mask = None if mask is not None and constant(mask) is True else mask
    if base.pointee != value.element and base.pointee[0] != "i" and name != "xchg":
        if name not in _OF_BITS:
            raise reader.refuse(op, f"an atomic {name} of the bits of floats", "Update integers.")
        name = _OF_BITS[name]
    value = _as_held(reader, value, base.pointee)
    read = bool(op.results) and op.results[0].id in reader.module.used
    offset = builder.whole(pointer.offset, type_.tile)
    if name == "add" and not read:
        builder.store(base, offset, builder.whole(value, type_.tile), mask, Code.ATOMIC_ADD)
        return [value] if op.results else []
    found = [Value(base.pointee, type_.tile)] if read else []
    operands = [offset, builder.whole(value, type_.tile), *([] if mask is None else [mask])]
    attributes = {"base": base, "masked": mask is not None, "operation": name}
    builder.add_op(Made(Code.ATOMIC, operands, found, attributes))
    if read:
        reader.loaded.add(base.name)
        return [_as_read(reader, found[0], element_of(type_))]
    return [value] if op.results else []


@reads("tt.atomic_rmw")
def _read_modify_write(reader: Reader, op: Op, operands: list[Any]) -> Sequence[Item]:
    pointer, value, *mask = operands
    _known(reader, op, pointer)
    name = _NAMES[Update(op.attributes["atomic_rmw_op"])]
    return _update(reader, op, pointer, value, mask[0] if mask else None, name, op.results[0].type)


@reads("tt.descriptor_reduce")
def _update_block(reader: Reader, op: Op, operands: list[Any]) -> Sequence[Item]:
    block, value, *starts = operands
    type_ = op.operands[1].type
    update = OF_DESCRIPTORS.get(op.attributes["kind"])
    if update is None:
        raise reader.refuse(op, "this update by a descriptor is not supported", "Use an atomic on pointers.")
    pointer, mask = _block(reader, op, block, starts, _block_shape(block, type_), range(len(starts)))
    return _update(reader, op, pointer, value, mask, _NAMES[update], type_)


@reads("tt.atomic_cas", "tt.atomic_load", "tt.atomic_store", "tt.atomic_poll")
def _lock(reader: Reader, op: Op, _: list[Any]) -> Sequence[Item]:
    raise reader.refuse(
        op,
        "programs wait for each other, or compare and exchange memory",
        "Let programs write partial results, and sum them after the launch.",
    )
