"""`Step` and `Raise`: what a trip does to the carries of its loop, and to one of them that is a running maximum.

A trip whose source is unrolled finds several maxima, one after the other: each is a raise of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.saved.degree import STAYS, Degree, Degrees, Kind, defined_in, gauge, is_guard
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.uses import depends
from kernel_agent.compiler.ssa.value import VEILS, Block, Op, Value, bare, unspread

EXTREMES = (Code.MAX, Code.MIN)
"""What finds the number that a softmax subtracts; a softmin adds the smallest."""


@dataclass(frozen=True)
class Step:
    """What a trip does to the carries of its loop."""

    yields: tuple[Value, ...]
    """What they become, in trips that change them."""
    branch: Op | None = None
    """Where some become that: an IF whose other side leaves them as they are."""
    side: int = 0
    """Of its blocks."""

    @classmethod
    def of(cls, block: Block) -> Step:
        """Of the body of a loop."""
        yields, found, side = list(block.yields), None, 0
        for place, (carry, last) in enumerate(zip(block.arguments[1:], block.yields, strict=True)):
            op = bare(last).producer
            if op is None or op.code is not Code.IF or op not in block.ops or found not in (None, op):
                continue
            sides = [inner.yields[op.results.index(bare(last))] for inner in op.blocks]
            for number, other in enumerate(reversed(sides)):
                if bare(other) is carry and (found is None or number == side):
                    found, side, yields[place] = op, number, sides[number]
                    break
        return cls(tuple(yields), found, side)

    def ops(self, block: Block) -> list[Op]:
        """Operations of the loop's body that run in trips that change the carries."""
        return [*block.ops, *([] if self.branch is None else self.branch.blocks[self.side].ops)]


class NotOneError(Exception):
    """Why a maximum that is subtracted is not free to be another."""


@dataclass(frozen=True, eq=False)
class Raise:
    """The maximum as a trip finds it from one before."""

    maker: Op
    before: Value
    maxima: frozenset[Value]
    """All the forms the body has of it."""


def raises(step: Step, block: Block, place: int) -> list[Raise]:
    """How a carry becomes the largest of itself and others, from the first on; nothing where it does not."""
    old, last = block.arguments[1 + place], step.yields[place]
    found: list[Raise] = []
    new = bare(last)
    while old.is_float and new is not old:
        maker = new.producer
        if maker is None or maker.code not in EXTREMES or (found and maker.code is not found[0].maker.code):
            return []
        parts = list(map(bare, maker.operands))
        before = [part for part in parts if part is old or (part.producer and part.producer.code is maker.code)]
        before = [old] if old in before else before
        if len(before) != 1:
            return []
        forms = {new, *([] if found else [last])}
        forms.update(one.results[0] for one in step.ops(block) if one.results and is_guard(one, {new}))
        found.insert(0, Raise(maker, before[0], frozenset(forms)))
        (new,) = before
    return found


class Raised:
    """A step of a trip, from one maximum to the next: how values answer where this one shifts and no other is used."""

    def __init__(self, step: Raise, fixed: Mapping[Value, Degree | None], loop: Op) -> None:
        """`fixed`: what must not be used, but for this maximum."""
        self.step = step
        self._inside = {value.id for value in defined_in(loop)}
        given = {**fixed, **{value: gauge(value) for value in step.maxima}}
        self.degrees = Degrees(given)
        self._decaying = Degrees({**given, step.before: STAYS})

    def rate(self, decay: Value, rest: Iterable[Value], called: str, other: Degree | None) -> Degree:
        """That of a carry that is multiplied with `decay` and added to `rest`. `other`: in other steps of the trip, if
        there are such. Raises NotOneError."""
        alpha = bare(decay)
        rate, maker = self._decaying[decay], alpha.producer
        exponential = maker is not None and maker.code in (Code.EXP, Code.EXP2)
        if (
            maker is None
            or not exponential
            or rate is None
            or (other is not None and not other.same(rate))
            or not vanishes(maker.operands[0], self.step.before, self.step.maxima)
        ):
            raise NotOneError(f"{called} is not multiplied with exp(old - new)")
        if rate.within(self._inside):
            raise NotOneError(f"{called} is multiplied with exp(c (old - new)), and c is another one in every trip")
        for term in rest:
            degree = self.degrees[term]
            if degree is None or not (degree.kind is Kind.ZERO or degree.same(rate)):
                raise NotOneError(f"what is added to {called} does not scale as {called} does when the maximum shifts")
        return rate


def stepped(value: Value, carry: Value, *, first: bool) -> tuple[Value, Value, list[Value]]:
    """Of what a step makes of a carry: what it was before, what that is multiplied with, and what is added. `first`: it
    was the carry. Raises NotOneError."""
    decay, rest = decayed(value, carry)
    if decay is not None and first:
        return carry, decay, rest
    scaled = [term for term in rest if depends(term, {carry})]
    maker = scaled[0].producer if len(scaled) == 1 else None
    if decay is None and not first and maker is not None and maker.code is Code.MUL:
        for before, factor in (maker.operands, maker.operands[::-1]):
            if depends(before, {carry}) and not depends(factor, {carry}):
                return unspread(before), factor, [term for term in rest if term is not scaled[0]]
    called = f"`{carry.name}`" if carry.name else "another carry"
    raise NotOneError(f"{called} does not become {called} * exp(old - new) + something")


def decayed(value: Value, carry: Value) -> tuple[Value | None, list[Value]]:
    """The factor of a carry in a sum, and the other terms of the sum; None where there is not one such factor."""
    terms: list[Value] = []
    decays: list[Value] = []
    stack = [value]
    while stack:
        term = unspread(stack.pop())
        op = term.producer
        if op is not None and op.code is Code.ADD:
            stack.extend(op.operands)
        elif op is not None and op.code in (Code.FMA, Code.MUL) and carry in op.operands[:2]:
            decays.append(op.operands[1] if op.operands[0] is carry else op.operands[0])
            stack.extend(op.operands[2:])
        else:
            terms.append(term)
    return (decays[0] if len(decays) == 1 else None), terms


def vanishes(value: Value, old: Value, maxima: frozenset[Value]) -> bool:
    """Whether a value is zero where the old maximum is the new one."""
    op = value.producer
    if op is None:
        return False
    if op.code in VEILS or op.code in (Code.NEG, Code.DIV):
        return vanishes(op.operands[0], old, maxima)
    if op.code is Code.SUB:
        return _alike(op.operands[0], op.operands[1], old, maxima) or _alike(
            op.operands[1], op.operands[0], old, maxima
        )
    if op.code is Code.MUL:
        return any(vanishes(operand, old, maxima) for operand in op.operands)
    return False


def _alike(a: Value, b: Value, old: Value, maxima: frozenset[Value]) -> bool:
    """Whether the first is of the old maximum what the second is of the new one."""
    if (a is old and b in maxima) or a is b:
        return True
    left, right = a.producer, b.producer
    if left is None or right is None or left.code is not right.code or left.attributes != right.attributes:
        return False
    if left.code in EFFECTS or left.blocks or left.code is Code.LOAD or len(left.operands) != len(right.operands):
        return False
    if not left.operands:
        return False
    return all(_alike(x, y, old, maxima) for x, y in zip(left.operands, right.operands, strict=True))
