"""`unmasked`: choices of zero that change nothing, left out: where the lanes are zero anyway, or nobody looks at them.

Reverse mode puts a `where` before lanes meet, and takes each of the forward back by one. In a kernel that owns what it
sums most of them are of no use: keys beyond the last one are rows that no store writes, and a probability is zero
where the score was minus infinity. Each costs as much as a part of the exponential does.

That p * g is zero where p is takes g to be finite there: it must come of numbers in memory by products and sums, or be
one number for the whole row, since the lanes that count would not be finite either. A row of which nothing is seen has
no finite maximum: its forward is NaN already, or guards the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from kernel_agent.compiler.saved.lanes import Labels, Lanes, conditions, form, through
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, is_constant, unspread, walk

_MOVES = frozenset((Code.EXPAND, Code.TRANS, Code.BROADCAST, Code.FULL))
_KEEPS_FINITE = _MOVES | {
    Code.ADD, Code.SUB, Code.MUL, Code.NEG, Code.CAST, Code.ABS, Code.SUM, Code.DOT, Code.TANH, Code.SIGMOID, Code.ERF,
}  # fmt: skip
_COMBINING = frozenset((Code.REDUCE, Code.SCAN))
_KEEPS_ZERO = _MOVES | {Code.NEG, Code.CAST, Code.ABS, Code.SUM}


def unmasked(kernel: Kernel) -> Kernel:
    """The kernel whose choices of zero, or of minus infinity, ask only what matters."""
    lanes = Lanes(kernel)
    combined = {inner for op in kernel.ops if op.code in _COMBINING for inner in walk(op.blocks[0])}
    changing = {value for op in kernel.ops if op.code in (Code.FOR, Code.WHILE) for value in _defined(op)}
    present = {store: conditions(store.mask, _labels(store.offset)) for store in lanes.stores}
    needless: dict[Op, frozenset[int]] = {}
    for op in kernel.ops:
        if op.code is not Code.SELECT or op in combined:  # lanes of a combine are none that are stored
            continue
        if not op.result.is_float or constant(unspread(op.operands[2])) is None:
            continue
        condition, chosen, other = op.operands
        own = _labels(op.result)
        found = set()
        for place, (part, at) in enumerate(conjuncts(condition, own if condition.shape else ())):
            zero = is_constant(unspread(other), 0) and vanishes(chosen, own, form(part, at))
            if zero or (part not in changing and _unseen(lanes, present, op, place)):
                found.add(place)
        if found:
            needless[op] = frozenset(found)
    return _Unmasker(kernel, needless).copy() if needless else kernel


def conjuncts(mask: Value, labels: Labels) -> list[tuple[Value, Labels]]:
    """What all must hold where a mask does, in order, with the labels of its axes."""
    op = mask.producer
    if op is not None and op.code in _MOVES | {Code.AND}:
        inner = through(op, labels if mask.shape else ())
        if inner is not None:
            return [found for operand, names in inner for found in conjuncts(operand, names)]
    return [(mask, labels if mask.shape else ())]


def _unseen(lanes: Lanes, present: Mapping[Op, frozenset[Hashable]], op: Op, place: int) -> bool:
    """Whether the lanes where one part of a choice's condition fails have no part in what is stored. `present`: the
    conditions of each store."""
    condition = op.operands[0]
    for store in lanes.stores:
        for labels in lanes.reach(store, op.result):
            part, at = conjuncts(condition, labels)[place]
            if form(part, at) not in present[store]:
                return False
    return True


def vanishes(value: Value, labels: Labels, condition: Hashable) -> bool:
    """Whether a value is zero wherever a condition on its lanes fails."""
    return _Vanishing(condition).at(value, labels)


class _Vanishing:
    """Of values that are read several times each, every one is asked once."""

    def __init__(self, condition: Hashable) -> None:
        self.condition = condition
        self._zero: dict[tuple[Value, Labels], bool] = {}
        self._finite: dict[Value, bool] = {}

    def at(self, value: Value, labels: Labels) -> bool:
        """Whether a value is zero wherever the condition on its lanes fails."""
        if (value, labels) not in self._zero:
            self._zero[value, labels] = self._of(value, labels)
        return self._zero[value, labels]

    def _of(self, value: Value, labels: Labels) -> bool:
        if is_constant(value, 0):
            return True
        op, condition = value.producer, self.condition
        inner = None if op is None else through(op, labels if value.shape else ())
        if op is None or inner is None:
            return False
        if op.code is Code.LOAD:
            padded = op.mask is not None and op.other is not None and is_constant(unspread(op.other), 0)
            return padded and op.mask is not None and condition in conditions(op.mask, labels)
        if op.code in _KEEPS_ZERO:
            return self.at(*inner[0])
        if op.code is Code.MUL:
            sides = (inner, inner[::-1])
            row = len(value.shape) == 1 and isinstance(condition, tuple) and condition[0] != "scalar"
            return any(
                self.at(*side) and ((row and not other.shape) or finite(other, self._finite))
                for side, (other, _) in sides
            )
        if op.code in (Code.ADD, Code.SUB):
            return all(self.at(*side) for side in inner)
        if op.code is Code.SELECT:
            return _chooses(inner, condition, lambda side, at, _: self.at(side, at))
        if op.code in (Code.EXP, Code.EXP2):
            return _sinks(*inner[0], condition)
        return False


def finite(value: Value, known: dict[Value, bool] | None = None) -> bool:
    """Whether a value is a number in all lanes if what memory holds and scalars are numbers. `known`: of other values;
    what is found is added."""
    known = {} if known is None else known
    if value not in known:
        known[value] = _finite(value, known)
    return known[value]


def _finite(value: Value, known: dict[Value, bool]) -> bool:
    number, op = constant(value), value.producer
    if number is not None:
        return math.isfinite(number)
    if op is None:
        return value.shape == () and value.depth == 0
    if op.code is Code.LOAD:
        return op.mask is None or (op.other is not None and finite(unspread(op.other), known))
    if op.code is Code.SELECT:
        return all(finite(side, known) for side in op.operands[1:])
    return op.code in _KEEPS_FINITE and all(finite(operand, known) for operand in op.operands)


def _sinks(value: Value, labels: Labels, condition: Hashable, sign: int = -1) -> bool:
    """Whether a value is minus infinity wherever a condition on its lanes fails, or infinity by `sign` 1."""
    number = constant(value)
    if number is not None:
        return number == sign * math.inf
    op = value.producer
    inner = None if op is None else through(op, labels if value.shape else ())
    if op is None or inner is None:
        return False
    if op.code in _MOVES or op.code is Code.CAST:
        return _sinks(*inner[0], condition, sign)
    if op.code is Code.SUB:
        return _sinks(*inner[0], condition, sign) or _sinks(*inner[1], condition, -sign)
    if op.code is Code.SELECT:
        return _chooses(inner, condition, lambda side, at, known: _sinks(side, at, known, sign))
    if op.code is Code.MUL:
        factors = [constant(side) for side, _ in inner]
        return any(
            factor is not None and factor > 0 and _sinks(*inner[1 - place], condition, sign)
            for place, factor in enumerate(factors)
        )
    if op.code is Code.LOAD and op.mask is not None and op.other is not None:
        padding = constant(unspread(op.other))
        return padding == sign * math.inf and condition in conditions(op.mask, labels)
    return False


def _chooses(
    inner: Sequence[tuple[Value, Labels]],
    condition: Hashable,
    holds: Callable[[Value, Labels, Hashable], bool],
) -> bool:
    """Whether what a choice gives where a condition fails is as asked for."""
    (asked, at), *sides = inner
    if not holds(*sides[1], condition):
        return False
    return condition in conditions(asked, at) or holds(*sides[0], condition)


def _labels(value: Value) -> Labels:
    return tuple(range(len(value.shape)))


def _defined(loop: Op) -> Iterator[Value]:
    """Values that are others in other trips."""
    for block in loop.blocks:
        yield from block.arguments
        for op in walk(block):
            yield from op.results
            for inner in op.blocks:
                yield from inner.arguments


class _Unmasker(Copier):
    """Makes choices by what is left of their conditions."""

    def __init__(self, source: Kernel, needless: dict[Op, frozenset[int]]) -> None:
        super().__init__(source)
        self.needless = needless

    def pure(self, op: Op) -> None:
        """Choices."""
        dropped = self.needless.get(op)
        if dropped is None:
            super().pure(op)
            return
        condition, chosen, other = op.operands
        left = self._left(condition, iter(range(len(conjuncts(condition, _labels(condition))))), dropped)
        b = self.b
        found = self[chosen] if left is None else b.select(left, self[chosen], self[other])
        self[op.result] = b.whole(found, op.result.shape)

    def _left(self, mask: Value, places: Iterator[int], dropped: frozenset[int]) -> Value | None:
        """A condition without some of its parts, which are counted by `places`; None where nothing is left."""
        op = mask.producer
        if op is None or op.code not in _MOVES | {Code.AND}:
            return None if next(places) in dropped else self[mask]
        parts = [self._left(operand, places, dropped) for operand in op.operands]
        kept = [part for part in parts if part is not None]
        if len(kept) < len(parts):
            return kept[0] if kept else None
        found = self.b.again(op, kept)
        assert isinstance(found, Value)
        return found
