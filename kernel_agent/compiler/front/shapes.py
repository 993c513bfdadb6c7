"""Program ids, ranges, and operations that only move elements. Broadcasting leaves no trace: tiles do so themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kernel_agent.compiler.front.items import Item, Pointer
from kernel_agent.compiler.front.reader import Reader, element_of, reads
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op as Made
from kernel_agent.compiler.ssa.value import Value
from kernel_agent.ir.program import Op


def _on_offset(item: Item, change: Callable[[Value], Value]) -> Item:
    """A change of layout, of a tile or of addresses."""
    if isinstance(item, Pointer):
        return replace(item, offset=change(item.offset))
    assert isinstance(item, Value)
    return change(item)


@reads("tt.get_program_id")
def _program_id(reader: Reader, op: Op, _: list[Item]) -> Value:
    return reader.builder.program_id(int(op.attributes["axis"]))


@reads("tt.get_num_programs")
def _program_count(reader: Reader, op: Op, _: list[Item]) -> Value:
    return reader.builder.num_programs(int(op.attributes["axis"]))


@reads("tt.make_range")
def _range(reader: Reader, op: Op, _: list[Item]) -> Value:
    symbol = reader.symbols.get((id(op), -1))
    return reader.builder.arange(int(op.attributes["start"]), int(op.attributes["end"]), symbol)


@reads("tt.splat", "tt.broadcast", "tt.unsplat", "ttg.convert_layout")
def _same(reader: Reader, op: Op, operands: list[Item]) -> Item:
    if op.name != "tt.unsplat":
        return operands[0]
    return _on_offset(operands[0], lambda value: reader.builder.reshape(value, ()) if value.shape else value)


@reads("tt.expand_dims")
def _expand(reader: Reader, op: Op, operands: list[Item]) -> Item:
    return _on_offset(operands[0], lambda value: reader.builder.expand(value, int(op.attributes["axis"])))


@reads("tt.trans")
def _transpose(reader: Reader, op: Op, operands: list[Item]) -> Item:
    order = [int(axis) for axis in op.attributes["order"]]
    return _on_offset(operands[0], lambda value: reader.builder.trans(value, order) if value.shape else value)


@reads("tt.reshape")
def _reshape(reader: Reader, op: Op, operands: list[Item]) -> Item:
    return _on_offset(operands[0], lambda value: _reshaped(reader, value, op))


def _reshaped(reader: Reader, value: Value, op: Op) -> Value:
    """Extents of 1 that come are expanded, so that what broadcasts need not be made whole."""
    before, after = op.operands[0].type.tile, op.results[0].type.tile
    if value.shape == ():
        return value
    if value.shape == before and [n for n in before if n != 1] == [n for n in after if n != 1]:
        return _with_ones(reader, value, after)
    return reader.builder.reshape(reader.builder.whole(value, before), after)


def _with_ones(reader: Reader, value: Value, shape: tuple[int, ...]) -> Value:
    """The same extents with other ones between them."""
    builder = reader.builder
    inner = builder.reshape(value, [n for n in value.shape if n != 1])
    for axis, extent in enumerate(shape):
        if extent == 1 and inner.shape:
            inner = builder.expand(inner, axis)
    return inner


@reads("tt.join")
def _join(reader: Reader, op: Op, operands: list[Value]) -> Value:
    a, b = (reader.whole(value, op.operands[0].type) for value in operands)
    return reader.builder.pure(Code.JOIN, (a, b), a.element, op.results[0].type.tile)


@reads("tt.split")
def _split(reader: Reader, op: Op, operands: list[Value]) -> list[Value]:
    (value,) = operands
    if value.shape == ():
        return [value, value]
    made = value.producer
    if made is not None and made.code is Code.JOIN:
        return list(made.operands)
    whole = reader.whole(value, op.operands[0].type)
    results = [Value(value.element, whole.shape[:-1], name.variable) for name in op.results]
    return list(reader.builder.add_op(Made(Code.SPLIT, (whole,), results)).results)


@reads("tt.cat")
def _concatenate(reader: Reader, op: Op, operands: list[Value]) -> Value:
    builder = reader.builder
    a, b = (reader.whole(value, op.operands[0].type) for value in operands)
    pair = builder.pure(Code.JOIN, (a, b), a.element, (*a.shape, 2))
    last = len(a.shape)
    return builder.reshape(builder.trans(pair, (last, *range(last))), op.results[0].type.tile)


@reads("tt.gather")
def _gather(reader: Reader, op: Op, operands: list[Value]) -> Value:
    tile, indices = (reader.whole(value, name.type) for value, name in zip(operands, op.operands, strict=True))
    axis = {"axis": int(op.attributes["axis"])}
    return reader.builder.pure(Code.GATHER, (tile, indices), tile.element, indices.shape, axis)


@reads("tt.histogram")
def _histogram(reader: Reader, op: Op, operands: list[Value]) -> Value:
    """Of (N,) in B bins: the sum over N of a (N, B) tile of ones where they meet."""
    builder, (bins,) = reader.builder, op.results[0].type.tile
    values, *mask = operands
    hit = builder.compare("eq", builder.expand(reader.whole(values, op.operands[0].type), 1),
                          builder.expand(builder.cast(builder.arange(0, bins), values.element), 0))  # fmt: skip
    if mask:
        hit = builder.logical_and(hit, builder.expand(mask[0], 1))
    return builder.sum(builder.cast(hit, element_of(op.results[0].type)), 0)
