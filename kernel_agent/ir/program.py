"""A kernel as a small SSA program: what the parser makes and the executor walks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from kernel_agent.ir.attributes import Attribute
from kernel_agent.ir.types import Type


@dataclass(frozen=True)
class Frame:
    """One place in a source file."""

    file: str
    line: int
    column: int


@dataclass(eq=False)
class Value:
    """One SSA value."""

    id: int
    """Unique in its module."""
    name: str
    """SSA name, made of the source variable where Triton knows it."""
    type: Type

    @property
    def variable(self) -> str:
        """Name of the source variable, or empty for an anonymous value."""
        name = re.sub(r"(_\d+)?(#\d+)?$", "", self.name.lstrip("%"))
        return "" if name.isdigit() or re.fullmatch(r"(arg)?\d*", name) else name


@dataclass(eq=False)
class Block:
    """A straight run of operations with arguments."""

    label: str
    arguments: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """One operation."""

    name: str
    operands: list[Value]
    results: list[Value]
    attributes: dict[str, Attribute]
    regions: list[list[Block]]
    successors: list[str]
    """Labels of blocks a branch may go to."""
    location: str
    """Key into the module's location table, or a location spelt out."""
    last_uses: tuple[int, ...] = ()
    """Ids of values of the same block that nothing reads after this operation."""

    @cached_property
    def operand_ids(self) -> tuple[int, ...]:
        """Ids of the operands."""
        return tuple(value.id for value in self.operands)

    @cached_property
    def result_ids(self) -> tuple[int, ...]:
        """Ids of the results."""
        return tuple(value.id for value in self.results)

    @cached_property
    def promises(self) -> bool:
        """Whether the kernel promises something of the result to the compiler, as `tl.multiple_of` does."""
        return not self.attributes.keys().isdisjoint(("tt.contiguity", "tt.divisibility", "tt.constancy"))

    @cached_property
    def captures(self) -> tuple[int, ...]:
        """Ids of values from outside that the regions read."""
        inside: set[int] = set()
        read: dict[int, None] = {}
        for blocks in self.regions:
            inside.update(value.id for block in blocks for value in block.arguments)
            for op in walk(blocks):
                inside.update(result.id for result in op.results)
                inside.update(value.id for region in op.regions for block in region for value in block.arguments)
                read.update((value.id, None) for value in op.operands)
        return tuple(place for place in read if place not in inside)


@dataclass(eq=False)
class Function:
    """A kernel, or a device function that was not inlined."""

    name: str
    public: bool
    blocks: list[Block]


@dataclass(eq=False)
class Module:
    """One lowered kernel with the device functions it calls."""

    functions: dict[str, Function]
    locations: dict[str, str]
    text: str
    """The generic-form IR this module was read from."""

    @cached_property
    def entry(self) -> Function:
        """The kernel itself."""
        return next(function for function in self.functions.values() if function.public)

    @cached_property
    def all_ops(self) -> tuple[Op, ...]:
        """Every operation of every function, nested ones included."""
        return tuple(op for function in self.functions.values() for op in walk(function.blocks))

    @cached_property
    def positions(self) -> dict[int, int]:
        """Identity of an operation -> its position in `all_ops`."""
        return {id(op): position for position, op in enumerate(self.all_ops)}

    @cached_property
    def parents(self) -> dict[int, Block]:
        """Identity of an operation -> the block it stands in."""
        found = {}
        for function in self.functions.values():
            for block in [*function.blocks, *(b for op in walk(function.blocks) for r in op.regions for b in r)]:
                found.update({id(op): block for op in block.ops})
        return found

    @cached_property
    def used(self) -> frozenset[int]:
        """Ids of values that some operation reads."""
        return frozenset(value.id for op in self.all_ops for value in op.operands)

    @cached_property
    def widest(self) -> int:
        """Elements of the largest tile that an operation makes."""
        return max((math.prod(result.type.tile) for op in self.all_ops for result in op.results), default=1)

    def callee(self, op: Op) -> Function:
        """The device function that a call runs."""
        return self.functions[str(op.attributes["callee"]).lstrip("@").strip('"')]

    def frames(self, op: Op) -> tuple[Frame, ...]:
        """Source frames of an operation, innermost first; empty when Triton recorded none."""
        return tuple(self._frames(op.location, 0))

    def place(self, op: Op) -> Frame | None:
        """The innermost frame in the user's own code: Triton's library functions are skipped."""
        frames = self.frames(op)
        own = [frame for frame in frames if "/triton/language/" not in frame.file]
        return next(iter(own or frames), None)

    def _frames(self, location: str, depth: int) -> Iterator[Frame]:
        location = location.strip()
        if depth > 50:
            return
        if location.startswith("#"):
            if location in self.locations:
                yield from self._frames(self.locations[location], depth + 1)
        elif location.startswith("callsite("):
            callee, caller = split_callsite(location[len("callsite(") : -1])
            yield from self._frames(callee, depth + 1)
            yield from self._frames(caller, depth + 1)
        elif location.startswith("fused"):
            inner = location[location.index("[") + 1 : location.rindex("]")]
            yield from self._frames(inner.split(",")[0], depth + 1)
        elif match := re.fullmatch(r'"(.*?)":(\d+):(\d+)(?: to .*)?', location):
            yield Frame(match.group(1), int(match.group(2)), int(match.group(3)))
        elif match := re.fullmatch(r'"(?:[^"]*)"\((.*)\)', location):
            yield from self._frames(match.group(1), depth + 1)


def split_callsite(body: str) -> tuple[str, str]:
    """Split `callee at caller` at the top level: either side may itself hold a call site."""
    depth = 0
    for position, char in enumerate(body):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0 and body.startswith(" at ", position):
            return body[:position], body[position + 4 :]
    return body, "unknown"


def walk(blocks: list[Block]) -> Iterator[Op]:
    """Every operation in textual order, an operation before what is nested in it."""
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from walk(region)


def mark_last_uses(functions: dict[str, Function]) -> None:
    """Fill `Op.last_uses`, so that the executor can free values. Values read from another block are never listed."""
    for function in functions.values():
        _mark_region(function.blocks)


def _mark_region(blocks: list[Block]) -> None:
    for block in blocks:
        own = {value.id for value in block.arguments} | {result.id for op in block.ops for result in op.results}
        foreign = {value.id for other in blocks if other is not block for op in walk([other]) for value in op.operands}
        pending = own - foreign
        for op in reversed(block.ops):
            reads = {value.id for nested in _with_nested(op) for value in nested.operands}
            reads |= {result.id for result in op.results}
            op.last_uses = tuple(reads & pending)
            pending -= reads
            for region in op.regions:
                _mark_region(region)


def _with_nested(op: Op) -> Iterator[Op]:
    yield op
    for region in op.regions:
        yield from walk(region)
