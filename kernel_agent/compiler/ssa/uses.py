"""Who reads a value, what it is computed of, and what a piece of a program reads from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk


@dataclass(frozen=True)
class Uses:
    """Readers of the values of a kernel, as it is now."""

    readers: dict[Value, tuple[Op, ...]]
    """Operations that have it as an operand, in order, one as often as it reads it. Bases are not among them."""
    yielded: frozenset[Value]
    """What blocks yield."""

    @classmethod
    def of(cls, kernel: Kernel) -> Uses:
        """Readers of every value of a kernel."""
        readers: dict[Value, list[Op]] = {}
        yielded: set[Value] = set()
        for op in kernel.ops:
            for value in op.operands:
                readers.setdefault(value, []).append(op)
            for block in op.blocks:
                yielded.update(block.yields)
        return cls({value: tuple(ops) for value, ops in readers.items()}, frozenset(yielded))

    def __getitem__(self, value: Value) -> tuple[Op, ...]:
        return self.readers.get(value, ())

    def count(self, value: Value) -> int:
        """Reads of a value, of which a yield is at most one."""
        return len(self[value]) + (value in self.yielded)


def captured(blocks: Iterable[Block]) -> list[Value]:
    """What blocks read that they do not define themselves, bases of accesses included, each once, in order."""
    own: set[Value] = set()
    found: dict[Value, None] = {}

    def visit(block: Block) -> None:
        own.update(block.arguments)
        for op in block.ops:
            found.update(dict.fromkeys(value for value in op.operands if value not in own))
            if "base" in op.attributes and op.base not in own:
                found[op.base] = None
            for inner in op.blocks:
                visit(inner)
            own.update(op.results)
        found.update(dict.fromkeys(value for value in block.yields if value not in own))

    for block in blocks:
        visit(block)
    return list(found)


def computed_of(value: Value, *, down_to: Callable[[Value], bool] = lambda _: False) -> Iterator[Value]:
    """A value and all that it is computed of, what loops and branches capture too, each once. Of what is behind those
    that it goes `down_to` nothing is told."""
    seen: set[Value] = set()
    stack = [value]
    while stack:
        part = stack.pop()
        if part in seen:
            continue
        seen.add(part)
        yield part
        op = part.producer
        if op is not None and not down_to(part):
            stack.extend((*op.operands, *captured(op.blocks)))


def depends(value: Value, on: Set[Value]) -> bool:
    """Whether a value is computed of one of `on`, or is one."""
    return any(part in on for part in computed_of(value))


def made_in(block: Block) -> frozenset[Value]:
    """What a block and the blocks within it define, their arguments too."""
    own = set(block.arguments)
    for op in walk(block):
        own.update(op.results)
        for inner in op.blocks:
            own.update(inner.arguments)
    return frozenset(own)


def has_effects(op: Op) -> bool:
    """Whether an operation, or one nested in it, is among EFFECTS."""
    return op.code in EFFECTS or any(inner.code in EFFECTS for block in op.blocks for inner in walk(block))


def written_to(block: Block) -> frozenset[Value]:
    """Pointer arguments that a block stores or adds to."""
    writes = (Code.STORE, Code.STORE_BLOCK, Code.ATOMIC_ADD, Code.ATOMIC)
    return frozenset(op.base for op in walk(block) if op.code in writes)


def tapes_of(block: Block, code: Code) -> Iterator[str]:
    """Names of the tapes that a block stores to or loads from, by `code`."""
    for op in walk(block):
        if op.code is code:
            yield op.attributes["tape"]
