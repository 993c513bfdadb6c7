"""`behind_branches`: what either side of a branch adds to the same place, added once behind the branch.

A program that turns queries or copies values, as its number says, adds to its part of a packed gradient in one of two
places. Seen apart they are two additions whose elements may be the same; no program makes both. What comes out of the
branch is what to add, and behind it stands one addition under no condition, whose elements can be told and counted.

Both sides must end with straight code that reaches their additions, under one address and one mask that are known
before the branch. Nothing else in the kernel may touch the buffer: then it does not matter when it is added to.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.ssa.code import MEMORY, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk

Pair = tuple[Op, Op]
"""An addition of each side."""


def behind_branches(kernel: Kernel) -> Kernel:
    """A kernel whose branches leave to what follows them what both of their sides add to one place."""
    while True:
        steady = _only_added_to(kernel)
        found = {op: pairs for op in kernel.ops if op.code is Code.IF and (pairs := _pairs(op, steady))}
        if not found:
            return kernel
        kernel = prune(_Behind(kernel, found).copy())


def _only_added_to(kernel: Kernel) -> set[Value]:
    """Buffers that the kernel adds to and does nothing else with."""
    touched: dict[Value, set[Code]] = {}
    for op in kernel.ops:
        if op.code in MEMORY or "base" in op.attributes:
            touched.setdefault(op.base, set()).add(op.code)
    return {base for base, codes in touched.items() if codes == {Code.ATOMIC_ADD}}


def _pairs(branch: Op, steady: set[Value]) -> list[Pair]:
    """Additions of the one side with those of the other that go to the same place, each at most once."""
    if any(op.code is Code.LEAVE_IF for block in branch.blocks for op in walk(block)):
        return []  # a program may be gone before what follows
    then, other = ([op for op in block.ops if op.code is Code.ATOMIC_ADD] for block in branch.blocks)
    known = set(captured(branch.blocks))
    found: list[Pair] = []
    for one in then:
        if one.base not in steady or any(value not in known for value in _where(one)):
            continue
        same = next((two for two in other if _alike(one, two)), None)
        if same is not None:
            other.remove(same)
            found.append((one, same))
    return found


def _where(op: Op) -> Sequence[Value]:
    """What an addition's place depends on."""
    return (op.offset,) if op.mask is None else (op.offset, op.mask)


def _alike(one: Op, other: Op) -> bool:
    return one.base is other.base and _where(one) == _where(other) and one.stored.element == other.stored.element


class _Behind(Copier):
    """Lets branches yield what they would add."""

    def __init__(self, source: Kernel, pairs: dict[Op, list[Pair]]) -> None:
        super().__init__(source)
        self.pairs = pairs
        self.moved = {op for found in pairs.values() for pair in found for op in pair}

    def effect(self, op: Op) -> None:
        """Additions."""
        if self.slicing or op not in self.moved:
            super().effect(op)

    def branch(self, op: Op) -> None:
        """An IF."""
        pairs = self.pairs.get(op)
        if self.slicing or pairs is None:
            super().branch(op)
            return
        b, kept = self.b, self.kept(op)

        def side(number: int, block: Block) -> list[Value]:
            found = self.block(block, kept)
            return [*found, *(b.whole(self[pair[number].stored], pair[number].offset.shape) for pair in pairs)]

        then, other = op.blocks
        found = b.branch(self[op.operands[0]], lambda: side(0, then), lambda: side(1, other))
        for place, new in zip(kept, found, strict=False):
            self[op.results[place]] = new
        for (one, _), value in zip(pairs, found[len(kept) :], strict=True):
            mask = None if one.mask is None else self[one.mask]
            b.store(self[one.base], self.whole(one.offset), value, mask, Code.ATOMIC_ADD)
