"""`Skeleton`: the operations of a module without its numbers, and its numbers by place: what two modules share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from kernel_agent.compiler.ssa.special import Number
from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.program import Block, Module, Op, walk
from kernel_agent.ir.types import Type

Site = tuple[int, int]
"""(ordinal of an operation, place). Places from 0: a constant operand; -1: the extent of a range; from -2 down: extents
of the tile that an access moves; from `RESULTS` down: extents of results, which nothing but the kernel's table asks."""
RESULTS = -1000
_LOOPS = frozenset(("scf.for", "scf.while"))
_KEPT = frozenset(
    ("tt.load", "tt.store", "tt.dot", "tt.reduce", "tt.scan", "tt.atomic_rmw", "tt.descriptor_load", "math.exp")
)
_RANGES = frozenset(("start", "end"))


@dataclass(frozen=True)
class Skeleton:
    """What of a module does not change with the sizes of its tiles, and what does."""

    module: Module
    form: tuple[Hashable, ...]
    """Equal for modules that differ in numbers alone."""
    numbers: dict[Site, Number]
    ops: tuple[Op, ...]
    """By ordinal: every operation but constants."""

    def like(self, other: Skeleton) -> bool:
        """Whether two modules differ in numbers alone."""
        return self.form == other.form and self.numbers.keys() == other.numbers.keys()

    @property
    def loops(self) -> int:
        """How many loops there are."""
        return sum(op.name in _LOOPS for op in self.ops)

    @property
    def moves(self) -> Counter[str]:
        """Operations that no simplification drops or adds, by kind."""
        return Counter(op.name for op in self.ops if op.name in _KEPT)


def skeleton(module: Module) -> Skeleton:
    """Take a module apart."""
    form: list[Hashable] = []
    numbers: dict[Site, Number] = {}
    constants = {op.results[0].id: op for op in module.all_ops if op.name == "arith.constant"}
    ops = tuple(op for op in module.all_ops if op.name != "arith.constant")
    order: dict[int, int] = {}
    for function in module.functions.values():
        for block in _blocks(function.blocks):
            for name in block.arguments:
                order[name.id] = len(order)
                form.append(_rank(name.type))
    for op in ops:
        for name in op.results:
            order[name.id] = len(order)
    for ordinal, op in enumerate(ops):
        operands: list[Hashable] = []
        for place, name in enumerate(op.operands):
            constant = constants.get(name.id)
            number = None if constant is None else _number(constant)
            if number is None:
                operands.append(order[name.id] if constant is None else str(_data(constant)))
            else:
                operands.append("number")
                numbers[ordinal, place] = number
        numbers.update(_extents(op, ordinal))
        types = tuple(_rank(name.type) for name in op.results)
        form.append((op.name, tuple(operands), _attributes(op), types, len(op.regions), tuple(op.successors)))
    return Skeleton(module, tuple(form), numbers, ops)


def _blocks(blocks: list[Block]) -> Iterator[Block]:
    yield from blocks
    for op in walk(blocks):
        for region in op.regions:
            yield from region


def _data(op: Op) -> Any:
    """Of a constant, whatever its shape."""
    value = op.attributes["value"]
    return value.data if isinstance(value, Dense) else value


def _number(op: Op) -> Number | None:
    """The one number of a constant; None for conditions, tiles of several, and what is not finite."""
    data = _data(op)
    if isinstance(data, (bool, tuple, str)) or op.results[0].type.scalar.name == "i1" or not math.isfinite(data):
        return None
    number: Number = data
    return number


def _rank(type_: Type) -> Hashable:
    return (type_.kind, len(type_.shape), type_.scalar.name if not type_.scalar.shape else type_.scalar.kind)


def _extents(op: Op, ordinal: int) -> dict[Site, Number]:
    found: dict[Site, Number] = {}
    if op.name == "tt.make_range":
        found[ordinal, -1] = op.attributes["end"] - op.attributes["start"]
    moved = op.results[0].type if op.results else op.operands[-1].type if op.operands else None
    if op.name in ("tt.store", "tt.descriptor_store", "tt.descriptor_reduce") and len(op.operands) > 1:
        moved = op.operands[1].type
    if moved is not None and op.name.startswith("tt."):
        found.update({(ordinal, -2 - dim): extent for dim, extent in enumerate(moved.tile)})
    place = RESULTS
    for name in op.results:
        for extent in name.type.tile:
            found[ordinal, place] = extent
            place -= 1
    return found


def _attributes(op: Op) -> tuple[Hashable, ...]:
    """What an operation says besides its numbers."""
    skipped = _RANGES if op.name == "tt.make_range" else frozenset(("value", "function_type", "sym_name"))
    found = []
    for key, value in sorted(op.attributes.items()):
        if key in skipped:
            continue
        text = str(value)
        if key == "callee":  # the types of the arguments follow, with their extents
            text = text.partition("__")[0] + text.rpartition("_")[2]
        found.append((key, text))
    if op.name == "tt.make_range":
        found.append(("start", str(op.attributes["start"])))
    return tuple(found)
