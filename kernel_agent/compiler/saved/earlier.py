"""`use_earlier`: what an earlier trip stored is what a trip of a loop begins with: no tape keeps it once more.

A recurrence whose forward stores the state of every trip, under a condition beyond which the state is a number, as that
of a table of costs that is infinite outside of it: trip t loads what trip t - 1 stored, under the condition that trip
had, and a state that is handed on once more what trip t - 2 stored. The first trips begin with what the loop does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_agent.compiler.reverse.disjoint import Apart
from kernel_agent.compiler.saved.outputs import HEAVY, Saved
from kernel_agent.compiler.ssa.code import CONTROL, MEMORY, Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import computed_of, depends
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant, unspread

MOST = 4
"""Trips back that are asked for."""


@dataclass(frozen=True)
class Ended:
    """What trips of a loop end with, in memory."""

    store: Op
    condition: Value
    """Where it is more than a number; the store has all of that."""
    rest: float
    """That number."""


def use_earlier(kernel: Kernel) -> Saved:
    """The kernel with what its trips begin with KNOWN from what earlier ones stored."""
    found: dict[Op, dict[int, Ended]] = {}
    for loop, around in _loops(kernel.body, ()):
        ended = _ended(kernel, loop, around) if _counts_up(loop) else {}
        if ended:
            found[loop] = ended
    if not found:
        return Saved(kernel, frozenset())
    read = {one.store.base.name for ended in found.values() for one in ended.values()}
    remarks = tuple(f"what trips begin with is read from {name}, as earlier ones stored it" for name in sorted(read))
    return Saved(_Earlier(kernel, found).copy(), frozenset(read), remarks)


def _loops(block: Block, around: tuple[Op, ...]) -> list[tuple[Op, tuple[Op, ...]]]:
    """All loops, with those around each."""
    found = []
    for op in block.ops:
        if op.code is Code.FOR:
            found.append((op, around))
        for inner in op.blocks:
            found += _loops(inner, (*around, op) if op.code in CONTROL else around)
    return found


def _counts_up(loop: Op) -> bool:
    """Whether each trip's index is a number more than the one before."""
    step = constant(loop.operands[2])
    return not loop.attributes["reverse"] and step is not None and step > 0


def _ended(kernel: Kernel, loop: Op, around: tuple[Op, ...]) -> dict[int, Ended]:
    """By carry, what a loop stores of what its trips end with, and nothing else changes."""
    (block,) = loop.blocks
    found = {}
    for place, value in enumerate(block.yields):
        stores = [op for op in block.ops if op.code is Code.STORE and op.stored is value]
        ended = _chosen(stores[0], value) if len(stores) == 1 else None
        if ended is not None and _stays(kernel, loop, around, ended):
            found[place] = ended
    return found


def _chosen(store: Op, value: Value) -> Ended | None:
    """What is stored, if it is a number wherever the store is masked."""
    op = value.producer
    if op is None or op.code is not Code.SELECT or not value.is_float or value.shape != store.offset.shape:
        return None
    condition, _, rest = op.operands
    number = constant(unspread(rest))
    asked = [] if store.mask is None else conjuncts(store.mask)
    if number is None or condition.shape != value.shape or not set(asked) <= set(conjuncts(condition)):
        return None
    return Ended(store, condition, float(number))


def _stays(kernel: Kernel, loop: Op, around: tuple[Op, ...], ended: Ended) -> bool:
    """Whether memory keeps what each trip stored, at an address that other trips can compute."""
    store = ended.store
    if any(op is not store for op in kernel.ops if op.code in MEMORY and op.base is store.base):
        return False
    if any(outer.code is not Code.FOR for outer in around):
        return False
    asked, carries = (store.offset, ended.condition), set(loop.blocks[0].arguments[1:])
    if any(depends(value, carries) or _looks(value) for value in asked):
        return False
    indices = [one.blocks[0].arguments[0] for one in (*around, loop)]
    return all(depends(store.offset, {index}) for index in indices) and Apart(kernel).tells_trips(store, strided=True)


def _looks(value: Value) -> bool:
    """Whether computing a value again takes memory, loops or reductions."""
    made = (part.producer for part in computed_of(value))
    return any(op is not None and (bool(op.blocks) or op.code in MEMORY or op.code in HEAVY) for op in made)


def _back(loop: Op, place: int, ended: Mapping[int, Ended]) -> list[int]:
    """The carries that one is handed on from, the last of which memory has; empty where it has none of them."""
    (block,) = loop.blocks
    found = [place]
    while found[-1] not in ended:
        value = block.yields[found[-1]]
        if value not in block.arguments[1:] or len(found) == MOST:
            return []
        found.append(block.arguments.index(value) - 1)
    return found


class _Earlier(Copier):
    """Makes what trips begin with KNOWN."""

    def __init__(self, source: Kernel, found: Mapping[Op, Mapping[int, Ended]]) -> None:
        super().__init__(source)
        self.found = found

    def entered(self, op: Op) -> None:
        """A trip."""
        ended = self.found.get(op, {})
        for place, carry in enumerate(op.blocks[0].arguments[1:]):
            path = _back(op, place, ended) if ended else []
            if path:
                self[carry] = self.b.known(self[carry], self._loaded(op, path, ended[path[-1]]))

    def _loaded(self, loop: Op, path: list[int], ended: Ended) -> Value:
        """What the trip as many trips back as the path is long ended with; in the first trips what the loop begins
        with."""
        b, index = self.b, self[loop.blocks[0].arguments[0]]
        start, step = self[loop.operands[0]], int(constant(loop.operands[2]) or 0)
        begins = [b.add(start, b.const(step * trip, start.element)) for trip in range(len(path))]
        before = self.aside()
        before[loop.blocks[0].arguments[0]] = b.sub(index, b.const(step * len(path), index.element))
        there = b.logical_and(before[ended.condition], b.compare("gt", index, begins[-1]))
        base = ended.store.base
        name = loop.blocks[0].arguments[1 + path[0]].name
        number = b.load(
            base, before.whole(ended.store.offset), there, b.const(ended.rest, base.pointee), name, saved=True
        )
        for begin, place in reversed(list(zip(begins, path, strict=True))):
            first = self[loop.operands[3 + place]]
            if constant(unspread(first)) != ended.rest:
                number = b.select(b.compare("eq", index, begin), first, number)
        return number
