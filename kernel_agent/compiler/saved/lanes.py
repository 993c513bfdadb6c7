"""`Lanes`: which lanes of a value the lanes of a store depend on, and under which conditions that store writes.

Axes carry labels: those of a stored tile are 0, 1, ...; on the way down to what it is computed of, an axis that is
summed over, or that a product contracts, gets a label of its own, which no condition of the store can name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.ssa.code import ELEMENTWISE, MEMORY, Code
from kernel_agent.compiler.ssa.shapes import OF_AXIS
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, constant

Labels = tuple[Hashable, ...]
"""One for every axis; none for scalars."""
_WIDENS = frozenset((Code.BROADCAST, Code.FULL))
_RISES = frozenset(
    (Code.ADD, Code.SELECT, Code.CAST, Code.KNOWN, Code.LOG, Code.LOG2, Code.EXPAND, Code.TRANS, *_WIDENS)
)
_REDUCES = frozenset((Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.ARG_MAX, Code.ARG_MIN))


def form(value: Value, labels: Labels) -> Hashable:
    """What a value is at a lane, in terms of labelled axes: equal forms are equal numbers at lanes of equal labels."""
    if value.shape == ():
        return ("scalar", value.id)
    op = value.producer
    if op is None:
        return ("tile", value.id, _full(value, labels))
    if op.code is Code.ARANGE:
        return ("arange", op.attributes["start"], op.attributes["end"], labels)
    inner = through(op, labels)
    if inner is not None and op.code in _WIDENS | {Code.EXPAND, Code.TRANS}:
        ((operand, names),) = inner
        return form(operand, names)
    if op.code in ELEMENTWISE and inner is not None:
        attributes = tuple(sorted((key, value) for key, value in op.attributes.items() if key != "symbol"))
        return (op.code, attributes, value.element, *(form(operand, names) for operand, names in inner))
    return ("tile", value.id, _full(value, labels))


def conditions(mask: Value | None, labels: Labels) -> frozenset[Hashable]:
    """What all must hold where a mask does; nothing for None."""
    if mask is None:
        return frozenset()
    op = mask.producer
    if op is not None and op.code in _WIDENS | {Code.AND, Code.EXPAND, Code.TRANS}:
        inner = through(op, labels if mask.shape else ())
        if inner is not None:
            return frozenset().union(*(conditions(operand, names) for operand, names in inner))
    return frozenset([form(mask, labels if mask.shape else ())])


def unless_infinite(value: Value, labels: Labels) -> frozenset[Hashable]:
    """What all must hold where a value is not minus infinity, as it is where nothing was loaded; nothing if that is not
    known."""
    op, labels = value.producer, labels if value.shape else ()
    if op is None:
        return frozenset()
    if op.code is Code.LOAD and op.other is not None and constant(bare(op.other)) == -math.inf:
        return conditions(op.mask, labels)
    if op.code in (Code.SUB, Code.ADD, Code.CAST, Code.EXPAND, Code.TRANS, *_WIDENS):
        inner = through(op, labels) or []
        less = inner[:1] if op.code is Code.SUB else inner
        return frozenset().union(*(unless_infinite(operand, names) for operand, names in less))
    return frozenset()


@dataclass(frozen=True)
class _Way:
    """How what is stored depends on a value."""

    value: Value
    labels: Labels
    """Its axes."""
    rising: frozenset[Hashable] = frozenset()
    """Must hold for it to matter: it is taken off minus infinity otherwise. Only where all between raises what it is
    made of, and so makes no less than a finite number of one, or of infinity."""
    chosen: frozenset[tuple[Hashable, int]] = frozenset()
    """Must hold for it to matter, as selects ask, with the depth of their loops."""


class Lanes:
    """What the stores of a kernel depend on."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.stores = tuple(
            op for op in kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC) and op.stored.is_float
        )
        """Effects whose values have cotangents."""
        self._carried: dict[Value, tuple[Op, int]] = {
            value: (op, place)
            for op in kernel.ops
            if op.code is Code.FOR
            for place, value in enumerate(op.blocks[0].arguments[1:])
        }
        self._reached: dict[Op, dict[Value, set[Labels]]] = {}
        """By store, all that it depends on: many values of a kernel are asked for."""

    def reach(self, store: Op, target: Value) -> frozenset[Labels]:
        """The lanes of `target` that a lane of a store depends on, by every way there is that `target` begins."""
        if store not in self._reached:
            self._reached[store] = self._walked(store.stored, None, len(store.offset.shape))
        found = self._reached[store].get(target, set())
        if len(found) > 1 and self._carried:  # some may be lanes of an earlier trip, by way of the target itself
            found = self._walked(store.stored, target, len(store.offset.shape))[target]
        return frozenset(found)

    def _walked(self, start: Value, target: Value | None, rank: int | None = None) -> dict[Value, set[Labels]]:
        """The lanes of all values that a lane of a value depends on, but for what only a target is computed of.
        `rank`: of what the value is stored to; by default its own."""
        rank = len(start.shape) if rank is None else rank
        found: dict[Value, set[Labels]] = {}
        stack: list[tuple[Value, Labels]] = [(start, tuple(range(rank)) if start.shape else ())]
        while stack:
            value, labels = stack.pop()
            labels = labels if value.shape else ()
            known = found.setdefault(value, set())
            if labels in known:
                continue
            known.add(labels)
            if value is not target:
                stack.extend(self._sources(value, labels))
        return found

    def confined(self, value: Value, mask: Value | None, without: int | None = None) -> bool:
        """Whether no lane of `value` outside of a mask has a part in what is stored anywhere. `without`: an axis that
        the value or the mask does not have; the other is one for all lanes along it, or each lane of it counts.

        Its adjoint is zero there then, and the value may be anything.
        """
        if mask is None:
            return True
        asked = functools.partial(_of_rows, mask, without)
        for store in self.stores:
            present = conditions(store.mask, tuple(range(len(store.offset.shape))))
            wanted = [asked(labels) - present for labels in self.reach(store, value)]
            if any(wanted) and not all(
                asked(way.labels) <= present | way.rising | {one for one, _ in way.chosen}
                for way in self._ways(store, value, frozenset().union(*wanted))
            ):
                return False
        return True

    def _ways(self, store: Op, target: Value, wanted: frozenset[Hashable]) -> list[_Way]:
        """As `reach`, with what must hold for `target` to matter; of what selects ask, only what is `wanted`."""
        axes: Labels = tuple(range(len(store.offset.shape))) if store.stored.shape else ()
        stack = [_Way(store.stored, axes)]
        seen = set(stack)
        while stack:
            way = stack.pop()
            if way.value is target:
                continue
            for further in self._further(way, wanted):
                if further not in seen:
                    seen.add(further)
                    stack.append(further)
        return [way for way in seen if way.value is target]

    def _further(self, way: _Way, wanted: frozenset[Hashable]) -> Iterator[_Way]:
        """One step on a way, to what its value is computed of."""
        op, nothing = way.value.producer, frozenset[Hashable]()
        kept = way.rising if op is None or op.code in _RISES else nothing
        for place, (operand, names) in enumerate(self._sources(way.value, way.labels)):
            rising, chosen = (kept if operand.element != "i1" else nothing), way.chosen
            if op is not None and op.code is Code.SUB and operand is op.operands[1] is not op.operands[0]:
                rising = unless_infinite(op.operands[0], way.labels)
            if op is not None and op.code is Code.SELECT and place == 1:
                test = op.operands[0]
                asked = conditions(test, way.labels if test.shape else ()) & wanted
                chosen = chosen | {(one, op.result.depth) for one in asked}
            if way.value in self._carried and place == 1:  # of the trip before, whose conditions are others
                chosen = frozenset((one, depth) for one, depth in chosen if depth < way.value.depth)
            yield _Way(operand, names if operand.shape else (), rising, chosen)

    def spared(self, index: Value, mask: Value | None, without: int | None = None) -> bool:
        """Whether lanes of an index outside of a mask are part of no address that is used, and of nothing that says
        what runs or is used: the index may be anything there, as far as memory is concerned. `without`: see above."""
        if mask is None:
            return True
        for op in self.kernel.ops:
            if any(index in self._walked(value, None) for value in _steering(op)):
                return False
            if op.code in MEMORY:
                present = conditions(op.mask, tuple(range(len(op.offset.shape))))
                for labels in self._walked(op.offset, None).get(index, ()):
                    if not _of_rows(mask, without, labels) <= present:
                        return False
        return True

    def _sources(self, value: Value, labels: Labels) -> Iterator[tuple[Value, Labels]]:
        """What a value is computed of, with the labels of its axes."""
        if value in self._carried:
            loop, place = self._carried[value]
            yield loop.operands[3 + place], labels
            yield loop.blocks[0].yields[place], labels
        op = value.producer
        if op is None:
            return
        if op.code is Code.FOR:
            place = op.results.index(value)
            yield op.operands[3 + place], labels
            yield op.blocks[0].yields[place], labels
            for bound in op.operands[:3]:
                yield bound, ()
            return
        if op.code is Code.IF:
            place = op.results.index(value)
            yield op.operands[0], ()
            for block in op.blocks:
                yield block.yields[place], labels
            return
        inner = through(op, labels)
        if inner is not None:
            yield from inner
            return
        for operand in (*op.operands, *captured(op.blocks)):
            yield operand, _lost(op, operand)


def through(op: Op, labels: Labels) -> list[tuple[Value, Labels]] | None:
    """The operands of an operation with the labels of their axes; None where lanes do not keep their places."""
    if op.code in ELEMENTWISE or op.code in _WIDENS or op.code is Code.LOAD:
        return [(operand, labels if operand.shape else ()) for operand in op.operands]
    if op.code is Code.EXPAND:
        axis = op.attributes["axis"]
        return [(op.operands[0], (*labels[:axis], *labels[axis + 1 :]))]
    if op.code is Code.TRANS:
        order = op.attributes["order"]
        names: list[Hashable] = [None] * len(order)
        for place, axis in enumerate(order):
            names[axis] = labels[place]
        return [(op.operands[0], tuple(names))]
    if op.code in _REDUCES:
        axis = op.attributes["axis"]
        return [(op.operands[0], (*labels[:axis], ("over", op.result.id), *labels[axis:]))]
    if op.code is Code.DOT:
        a, b = op.operands
        over = ("over", op.result.id)
        return [(a, (*labels[:-1], over)), (b, (*labels[:-2], over, labels[-1]))]
    if op.code in OF_AXIS and "axis" in op.attributes and len(op.results) == 1 and op.code is not Code.GATHER:
        axis = op.attributes["axis"]
        names = [*labels]
        names[axis] = ("along", op.result.id)
        return [(operand, tuple(names)) for operand in op.operands]
    return None


def _of_rows(mask: Value, without: int | None, labels: Labels) -> frozenset[Hashable]:
    """What all must hold where a mask does, whatever the lane along an axis that the labels or the mask lack."""
    if without is None or not mask.shape:
        return conditions(mask, labels)
    if len(labels) > len(mask.shape):
        return conditions(mask, (*labels[:without], *labels[without + 1 :]))
    return conditions(mask, (*labels[:without], None, *labels[without:]))


def _steering(op: Op) -> Sequence[Value]:
    """What says whether an operation runs, how often, and which of its lanes use memory."""
    if op.code in MEMORY:
        return () if op.mask is None else (op.mask,)
    if op.code is Code.FOR:
        return op.operands[:3]
    if op.code is Code.WHILE:
        return captured(op.blocks)
    if op.code is Code.STORE_BLOCK:
        return (op.operands[0], *op.operands[2:])
    blocks = (Code.IF, Code.LEAVE_IF, Code.DESCRIPTOR, Code.BLOCK_POINTER, Code.LOAD_BLOCK)
    return op.operands if op.code in blocks else ()


def _lost(op: Op, operand: Value) -> Labels:
    """Labels that no condition has."""
    return tuple(("lost", op.results[0].id, axis) for axis in range(len(operand.shape)))


def _full(value: Value, labels: Labels) -> Labels:
    """Labels of the axes that are not of extent 1."""
    return tuple(label for label, extent in zip(labels, value.shape, strict=True) if extent != 1)
