"""`use_taps`: a number that unrolled steps chose together with its index, as a sum that the stored index picks from.

Each step of an unrolled window takes a tap of it, or keeps what earlier steps chose, and does the same with the tap's
number. Its adjoint would load all taps to find every comparison again. But the number says which tap was taken: what
was chosen is the sum over all taps of the tap, if its number is the one, else zero. The forward stored the number, so
that the adjoint of this sum loads one small integer (see `outputs`), and no tap.

Where no tap is beyond minus infinity the one that is named counts, as in torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_agent.compiler.saved.outputs import Saved
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, beneath, constant, unspread

_BEYOND = {"gt": -math.inf, "ge": -math.inf, "lt": math.inf, "le": math.inf}
"""What no number is beyond, by how a number is compared with it."""
_LOWEST = {Code.MAX: -math.inf, Code.MIN: math.inf}


@dataclass(frozen=True)
class Tap:
    """A number that a step may have chosen."""

    number: Value
    name: int


@dataclass(frozen=True)
class Step:
    """One of several, each of which takes a number or keeps what was there."""

    number: Value
    kept: Value
    lowest: float | None
    """What no number is beyond that it is compared with; None where it asks for something else."""


@dataclass(frozen=True)
class Chosen:
    """A number, and what says which it is."""

    value: Value
    index: Value
    """As it is stored."""
    taps: tuple[Tap, ...]


def use_taps(kernel: Kernel) -> Saved:
    """A kernel that picks what unrolled steps chose by the index that they stored."""
    choices = [op for op in kernel.ops if op.code in (Code.SELECT, Code.MAX, Code.MIN) and op.result.is_float]
    stored = [
        op.stored for op in kernel.ops if op.code is Code.STORE and op.stored.element in ("i8", "i16", "i32", "i64")
    ]
    found: dict[Value, Chosen] = {}
    for index in stored:
        names = beneath(index, (Code.CAST,))
        for op in choices:
            taps = _taps(op.result, names)
            if taps and _fit(taps, index) and op.result.shape == index.shape:
                found[op.result] = Chosen(op.result, index, taps)
    return Saved(_Picked(kernel, found).copy() if found else kernel, frozenset())


def _taps(value: Value, index: Value) -> tuple[Tap, ...]:
    """What steps chose a value from, and its index with it; empty if the index does not tell."""
    taps: list[Tap] = []
    lowest: set[float | None] = set()
    while (choice := index.producer) is not None and choice.code is Code.SELECT:
        condition, named, before = choice.operands
        name, step = constant(unspread(named)), _step(value, condition)
        if step is None or type(name) is not int:
            return ()
        taps.append(Tap(step.number, name))
        lowest.add(step.lowest)
        index, value = before, step.kept
    first = constant(unspread(index))
    names = {tap.name for tap in taps}
    if type(first) is not int or len(names) != len(taps) or not taps:
        return ()
    start = constant(unspread(value))
    if start is not None:  # its index may be that of a tap if nothing is beyond it
        return tuple(taps) if first not in names or lowest == {start} else ()
    return () if first in names else (*taps, Tap(_first(value), first))


def _step(value: Value, condition: Value) -> Step | None:
    """The step that ends with a value, and takes what it does where a condition holds; None if there is none."""
    op, test = value.producer, condition.producer
    if op is None:
        return None
    lowest = None if test is None or test.code is not Code.CMP else _BEYOND.get(test.attributes["predicate"])
    sides = [] if test is None or lowest is None else [unspread(side) for side in test.operands]
    if op.code is Code.SELECT:
        number, kept = op.operands[1:]
        plain = sides == [unspread(number), unspread(kept)]
        return Step(number, kept, lowest if plain else None) if op.operands[0] is condition else None
    if lowest is None or lowest != _LOWEST.get(op.code):
        return None
    for number, kept in (op.operands, op.operands[::-1]):
        if sides == [unspread(number), unspread(kept)]:
            return Step(number, kept, lowest)
    return None


def _first(value: Value) -> Value:
    """The number that a first step took where it is beyond an infinity, else the value itself."""
    op = value.producer
    if op is not None and op.code is Code.SELECT:
        step = _step(value, op.operands[0])
        return step.number if step is not None and constant(unspread(step.kept)) == step.lowest is not None else value
    if op is not None and op.code in _LOWEST:
        for number, kept in (op.operands, op.operands[::-1]):
            if constant(unspread(kept)) == _LOWEST[op.code]:
                return number
    return value


def _fit(taps: tuple[Tap, ...], index: Value) -> bool:
    """Whether an index holds the names of all taps, so that what it holds of others is none of them."""
    half = 1 << (int(index.element[1:]) - 1)
    return all(-half <= tap.name < half for tap in taps)


class _Picked(Copier):
    """Takes what was chosen for a sum over all taps."""

    def __init__(self, source: Kernel, found: dict[Value, Chosen]) -> None:
        super().__init__(source)
        self.found = found

    def op(self, op: Op) -> None:
        super().op(op)
        one = self.found.get(op.results[0]) if op.results else None
        if one is None or self.slicing:
            return
        b, index = self.b, self[one.index]
        total = b.zero(self[one.value])
        for tap in reversed(one.taps):
            number = self[tap.number]
            hit = b.compare("eq", index, b.const(tap.name, index.element))
            total = b.add(total, b.select(hit, number, b.zero(number)))
        self[one.value] = b.known(total, self[one.value])
