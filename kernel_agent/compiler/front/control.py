"""Loops, conditions, early returns and calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kernel_agent.compiler.front import library
from kernel_agent.compiler.front.counting import counting
from kernel_agent.compiler.front.induction import Advance, Range, advance, after, at
from kernel_agent.compiler.front.items import (
    Item,
    Pointer,
    alike,
    all_parts,
    all_with_parts,
    parts,
)
from kernel_agent.compiler.front.offsets import at_least_zero
from kernel_agent.compiler.front.reader import Reader, element_of, reads
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Value, broadcast_shape, constant
from kernel_agent.compiler.ssa.value import Op as Made
from kernel_agent.ir.program import Block as Source
from kernel_agent.ir.program import Function, Op
from kernel_agent.ir.types import Kind


@reads("tt.assert", "cf.assert", "tt.print", "llvm.intr.assume", "tt.grid_dependency_wait",
       "tt.grid_dependency_launch_dependents")  # fmt: skip
def _nothing(_: Reader, __: Op, ___: list[Item]) -> None:
    return None


@reads("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "tt.debug_barrier")
def _barrier(reader: Reader, _: Op, __: list[Item]) -> None:
    reader.builder.add_op(Made(Code.BARRIER, (), ()))


# --- loops


def _starts(reader: Reader, op: Op, items: Sequence[Item], place: int) -> list[Item]:
    """What a loop begins with: floats as whole tiles, since the next trip fills them."""
    names = op.operands[place:]
    return [
        reader.whole(item, name.type) if isinstance(item, Value) and item.is_float else item
        for item, name in zip(items, names, strict=True)
    ]


def _check(reader: Reader, op: Op, first: Sequence[Item], later: Sequence[Item]) -> None:
    """Raises CannotDerive where a pointer goes on in another argument."""
    if not all(alike(a, b) for a, b in zip(first, later, strict=True)):
        raise reader.refuse(
            op, "a pointer may point into one of several arguments", "Load from each, and choose between the values."
        )


@reads("scf.for")
def _for(reader: Reader, op: Op, operands: list[Any]) -> list[Item]:
    return _looped(reader, op, Range(*operands[:3]), operands[3:], 3)


def _looped(reader: Reader, op: Op, bounds: Range, operands: list[Any], place: int) -> list[Item]:
    """A loop of known trips. `operands`: what it begins with, those of the operation from `place` on."""
    reader.builder.hint = ""  # results are named as what the loop carries
    starts = _starts(reader, op, operands, place)
    advances: dict[int, Advance] = {}
    if any(not value.is_float for value in all_parts(starts)):
        starts, advances = _tried(reader, op, bounds, starts)
    return _built(reader, op, bounds, starts, advances)


def _tried(reader: Reader, op: Op, bounds: Range, starts: list[Item]) -> tuple[list[Item], dict[int, Advance]]:
    """Read the body once and forget it. Where the loop begins with, as wide as its trips make it, and how parts
    advance, by their place."""
    builder, region = reader.builder, op.regions[0][0]
    while True:
        first = all_parts(starts)
        inner = [Value(value.element, value.shape) for value in first]
        block = Block([Value(bounds.start.element), *inner])
        with builder.inside(block):
            if at_least_zero(bounds.start, reader.at_least_zero):
                reader.at_least_zero.add(block.arguments[0])
            items = all_with_parts(starts, inner)
            reader.set(region.arguments, [block.arguments[0], *items])
            found = reader.run(region)
            _check(reader, op, starts, found)
        later = all_parts(found)
        wider = [_widened(reader, a, b) for a, b in zip(first, later, strict=True)]
        if all(a is b for a, b in zip(first, wider, strict=True)):
            break
        starts = all_with_parts(starts, wider)
    advances = {}
    for place, (carried, passed_on) in enumerate(zip(inner, later, strict=True)):
        if not carried.is_float and carried.element != "i1":
            how = advance(builder, carried, passed_on, builder.depth + 1)
            if how is not None:
                advances[place] = how
        elif passed_on is carried:
            advances[place] = Advance(None)
    return starts, advances


def _widened(reader: Reader, start: Value, later: Value) -> Value:
    """The start with the extents and the element that later trips need."""
    if not start.is_float and start.element != later.element:
        start = reader.builder.cast(start, "i64")
    shape = broadcast_shape([start.shape, later.shape])
    return start if start.shape == shape else reader.builder.whole(start, shape)


def _built(reader: Reader, op: Op, bounds: Range, starts: list[Item], advances: dict[int, Advance]) -> list[Item]:
    """The loop; what advances is not carried."""
    builder, region = reader.builder, op.regions[0][0]
    first = all_parts(starts)
    carried = [place for place in range(len(first)) if place not in advances]
    names = _part_names(op, starts)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        if at_least_zero(bounds.start, reader.at_least_zero):
            reader.at_least_zero.add(index)
        given = iter(carries)
        values = []
        for place, start in enumerate(first):
            if place not in advances:
                values.append(next(given))
                continue
            step = advances[place].step
            values.append(start if step is None else _like(reader, at(builder, start, step, index, bounds), start))
        reader.set(region.arguments, [index, *all_with_parts(starts, values)])
        later = all_parts(reader.run(region))
        return [later[place] for place in carried]

    hints = {key.removeprefix("tt."): value for key, value in op.attributes.items() if key.startswith("tt.")}
    index_name = region.arguments[0].variable
    results = iter(
        builder.loop(
            (bounds.start, bounds.stop, bounds.step),
            [first[place] for place in carried],
            body,
            index_name=index_name,
            names=[names[place] for place in carried],
            **hints,
        )
    )
    used = reader.module.used
    ends = []
    for place, start in enumerate(first):
        if place not in advances:
            ends.append(next(results))
            continue
        step = advances[place].step
        needed = step is not None and any(name.id in used for name in op.results)
        ends.append(_like(reader, after(builder, start, step, bounds), start) if needed and step is not None else start)
    return all_with_parts(starts, ends)


def _like(reader: Reader, value: Value, start: Value) -> Value:
    """A closed form in the element of what the loop begins with; offsets may be wider than they began."""
    if value.element == start.element or int(value.element[1:]) > int(start.element[1:]):
        return value
    return reader.builder.cast(value, start.element)


def _part_names(op: Op, items: Sequence[Item]) -> list[str]:
    """What the source calls each part of what a loop carries."""
    arguments = op.regions[0][0].arguments[-len(items) :] if items else []
    return [name.variable for name, item in zip(arguments, items, strict=True) for _ in parts(item)]


@reads("scf.while")
def _while(reader: Reader, op: Op, operands: list[Any]) -> list[Item]:
    return _counted(reader, op, operands) or _asked(reader, op, operands)


def _counted(reader: Reader, op: Op, operands: list[Any]) -> list[Item] | None:
    """A loop that counts, as a for loop; None for any other."""
    found = counting(op)
    if found is None:
        return None
    start, bound, step = operands[found.place], reader.operand(*found.bound), reader.operand(*found.step)
    if not all(isinstance(one, Value) and one.element == start.element for one in (start, bound, step)):
        return None
    assert isinstance(bound, Value)
    assert isinstance(step, Value)
    number = constant(step)
    if number is None or number <= 0:
        return None
    bounds = Range(start, bound, step)
    others = [*operands[: found.place], *operands[found.place + 1 :]]
    results = _looped(reader, found.loop, bounds, others, 0)
    needed = op.results[found.place].id in reader.module.used
    results.insert(found.place, after(reader.builder, start, step, bounds) if needed else start)
    return results


def _asked(reader: Reader, op: Op, operands: list[Any]) -> list[Item]:
    """A loop that asks before every trip."""
    builder = reader.builder
    builder.hint = ""
    starts = [
        reader.whole(item, name.type) if isinstance(item, Value) else _wide(reader, item)
        for item, name in zip(operands, op.operands, strict=True)
    ]
    before = Block([Value(value.element, value.shape, value.name) for value in all_parts(starts)])
    with builder.inside(before):
        reader.set(op.regions[0][0].arguments, all_with_parts(starts, before.arguments))
        condition, *passed = reader.run(op.regions[0][0])
        passed = [
            reader.whole(item, name.type) if isinstance(item, Value) else _wide(reader, item)
            for item, name in zip(passed, op.results, strict=True)
        ]
        before.yields = [condition, *all_parts(passed)]  # type: ignore[list-item]
    after_ = Block([Value(value.element, value.shape, value.name) for value in all_parts(passed)])
    with builder.inside(after_):
        reader.set(op.regions[1][0].arguments, all_with_parts(passed, after_.arguments))
        found = reader.run(op.regions[1][0])
        _check(reader, op, starts, found)
        later = zip(all_parts(found), before.arguments, strict=True)
        after_.yields = [builder.whole(_like(reader, value, like), like.shape) for value, like in later]
    results = [Value(value.element, value.shape, value.name) for value in all_parts(passed)]
    made = builder.add_op(Made(Code.WHILE, all_parts(starts), results, {}, [before, after_]))
    return all_with_parts(passed, made.results)


def _wide(reader: Reader, item: Item) -> Item:
    """An address in 64 bits, since what follows may need them."""
    return all_with_parts([item], [reader.builder.cast(value, "i64") for value in parts(item)])[0]


# --- conditions


@reads("scf.if")
def _if(reader: Reader, op: Op, operands: list[Any]) -> list[Item]:
    (condition,) = operands
    builder = reader.builder
    regions = [region[0] if region else None for region in (op.regions[0], op.regions[1])]
    kinds: list[list[Item]] = []

    def side(region: Source | None) -> list[Value]:
        items = [] if region is None else reader.run(region)
        items = [item if isinstance(item, Value) else _wide(reader, item) for item in items]
        kinds.append(items)
        return all_parts(items)

    if reader.lanes:
        both = [side(region) for region in regions]
        values: Sequence[Value] = [builder.select(condition, a, b) for a, b in zip(*both, strict=True)]
    else:
        values = builder.branch(condition, lambda: side(regions[0]), lambda: side(regions[1]))
    _check(reader, op, kinds[0], kinds[1])
    for value, name in zip(values, op.results, strict=False):
        value.name = value.name or name.variable
    return all_with_parts(kinds[0], values)


# --- functions


def run_function(reader: Reader, function: Function) -> None:
    """Read the kernel itself, whose blocks may end early."""
    _Body(reader, function).run(function.blocks[0])


class _Body:
    """The blocks of a kernel: returns split them."""

    def __init__(self, reader: Reader, function: Function) -> None:
        self.reader = reader
        self.blocks = {block.label: block for block in function.blocks}

    def leaves(self, block: Source) -> bool:
        """Whether a block does nothing but return."""
        (first, *rest) = block.ops
        if first.name == "cf.br" and not first.operands:
            return self.leaves(self.blocks[first.successors[0]])
        return first.name == "tt.return" and not rest

    def run(self, block: Source) -> None:
        """Read from a block on to the end of the program."""
        reader = self.reader
        for op in block.ops:
            if op.name == "tt.return":
                return
            if op.name == "cf.br":
                target = self.blocks[op.successors[0]]
                reader.set(target.arguments, reader.operands(op))
                self.run(target)
            elif op.name == "cf.cond_br":
                self.split(op)
            else:
                reader.read(op)

    def split(self, op: Op) -> None:
        """A condition that some programs end by."""
        reader, builder = self.reader, self.reader.builder
        condition, *rest = reader.operands(op)
        assert isinstance(condition, Value)
        then, other = (self.blocks[label] for label in op.successors)
        reader.set(then.arguments, rest[: len(then.arguments)])
        reader.set(other.arguments, rest[len(then.arguments) :])
        opposite = builder.elementwise(Code.XOR, (condition, builder.const(True, "i1")), "i1")
        if self.leaves(then) and self.leaves(other):
            return
        if self.leaves(other):
            condition, opposite, then, other = opposite, condition, other, then
        if self.leaves(then) and not reader.effects and builder.depth == 0:
            builder.add_op(Made(Code.LEAVE_IF, (condition,), ()))
            self.run(other)
        elif self.leaves(then):
            builder.branch(opposite, lambda: self.rest(other), list)
        else:
            builder.branch(condition, lambda: self.rest(then), lambda: self.rest(other))

    def rest(self, block: Source) -> list[Value]:
        """What comes after a condition, as a side of it."""
        self.run(block)
        return []


_LIBRARY = re.compile(r"triton\.language\.(random|standard)\.(\w+?)__\w*?(?:_c(\w*))?\W*")


_ROUNDS = "10"
"""Of the random numbers' generator, unless a kernel says otherwise."""


@reads("tt.call")
def _call(reader: Reader, op: Op, operands: list[Any]) -> Sequence[Item]:
    match = _LIBRARY.fullmatch(str(op.attributes["callee"]).strip('@"'))
    if match is not None and match.group(2) in library.KEPT and match.group(3) == _ROUNDS:
        return [library.call(reader, op, operands, "tl." + match.group(2))]
    if match is not None and match.group(2) == "flip":
        tile = reader.whole(operands[0], op.operands[0].type)
        axis = int(match.group(3)) % len(tile.shape) if match.group(3).isdigit() else len(tile.shape) - 1
        return [reader.builder.pure(Code.FLIP, (tile,), tile.element, tile.shape, {"axis": axis})]
    function = reader.module.callee(op)
    if len(function.blocks) != 1:
        raise reader.refuse(op, f"the function {function.name} returns early", "Return once, at its end.")
    (block,) = function.blocks
    reader.set(block.arguments, operands)
    for inner in block.ops:
        if inner.name == "tt.return":
            return reader.operands(inner)
        reader.read(inner)
    return []


def arguments_of(function: Function) -> list[Value]:
    """The kernel's arguments: pointers and scalars; a descriptor is the pointer it begins with."""
    found = []
    for argument in function.blocks[0].arguments:
        type_ = argument.type
        element = (
            "*" + element_of(type_.element) if type_.kind is Kind.DESCRIPTOR and type_.element else element_of(type_)
        )
        found.append(Value(element, (), argument.name.lstrip("%")))
    return found


__all__ = ["Pointer", "arguments_of", "run_function"]
