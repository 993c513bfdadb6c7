"""`Degrees`: how values answer to a shift of the maximum that a softmax subtracts.

When a number m becomes m + D, a value v may stay, become v + r D (a shift), or become v exp(r D) (a scale). Of a tile
of numbers each becomes another by a D of its own. A kernel all of whose results stay may use any m it likes, and has no
derivative with respect to m. Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), is the
recurrence this is for.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.saved.rates import Rates, added, same, scaled, through, whole
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Op, Value, bare, constant


class Kind(enum.Enum):
    """Of an answer."""

    STAYS = "stays"
    SHIFT = "shift"
    SCALE = "scale"
    ZERO = "zero"
    """The constant 0: a scale of any rate."""
    INFINITE = "infinite"
    """An infinite constant: a shift of any rate."""


@dataclass(frozen=True)
class Degree:
    """Of a value."""

    kind: Kind
    rates: Rates = ()
    """Of a shift or a scale."""

    def same(self, other: Degree) -> bool:
        """Whether both are of one kind and rate."""
        return self.kind is other.kind and same(self.rates, other.rates)

    def within(self, ids: Iterable[int]) -> bool:
        """Whether it says anything in terms of these values."""
        return any(rate.names(ids) for rate in self.rates)


STAYS = Degree(Kind.STAYS)
ZERO = Degree(Kind.ZERO)
INFINITE = Degree(Kind.INFINITE)
_PASSES = frozenset((Code.EXPAND, Code.BROADCAST, Code.FULL, Code.CAST, Code.TRANS, Code.RESHAPE, Code.FLIP))
_EXPONENTIAL = {Code.EXP: 1.0, Code.EXP2: math.log(2)}
_LOGARITHM = {Code.LOG: 1.0, Code.LOG2: 1 / math.log(2)}
_LINEAR = frozenset((Code.SUM, Code.CUMSUM))
_ORDER = frozenset((Code.MAX, Code.MIN))
_EXTREMES = frozenset((Code.REDUCE_MAX, Code.REDUCE_MIN))


def gauge(value: Value) -> Degree:
    """Of the number that a softmax subtracts, or of a tile of such numbers, each of which shifts by itself."""
    return Degree(Kind.SHIFT, whole(value))


def _shift(rates: Rates) -> Degree:
    return Degree(Kind.SHIFT, rates) if rates else STAYS


def _scale(rates: Rates) -> Degree:
    return Degree(Kind.SCALE, rates) if rates else STAYS


class Degrees:
    """Answers of the values of a kernel, found on demand; None where there is none of these kinds."""

    def __init__(
        self,
        given: Mapping[Value, Degree | None],
        masses: Callable[[Value], bool] | None = None,
        arms: Mapping[Value, Value] | None = None,
    ) -> None:
        """`given`: where the shift comes in; None for what must not be used.

        `masses`: whether a value is a sum of exponentials which, where it is zero, makes all else vanish there too.
        `arms`: of choices, the side that matters (see `kept_arms`).
        """
        self._known: dict[Value, Degree | None] = dict(given)
        self._given = frozenset(given)
        self._masses = masses or (lambda _: False)
        self._arms = arms or {}

    def __getitem__(self, value: Value) -> Degree | None:
        if value in self._known:
            return self._known[value]
        stack = [value]
        while stack:
            top = stack[-1]
            op = top.producer
            if top in self._known or op is None:
                self._known.setdefault(top, STAYS)
                stack.pop()
                continue
            missing = [v for v in (*op.operands, *captured(op.blocks)) if v not in self._known]
            if missing:
                stack.extend(missing)
                continue
            self._calculate(op)
            stack.pop()
        return self._known[value]

    def stays(self, value: Value) -> bool:
        """Whether a value is the same at any shift."""
        found = self[value]
        return found is not None and found.kind in (Kind.STAYS, Kind.ZERO, Kind.INFINITE)

    def _calculate(self, op: Op) -> None:
        if op.code is Code.FOR:
            self.loop(op)
            return
        if all(self.stays(v) for v in (*op.operands, *captured(op.blocks))):
            answer: Degree | None = self._constant(op)
            if len(op.results) == 1 and op.code in _PASSES:
                answer = self._known[op.operands[0]]
        else:
            answer = self._elementary(op)
        self._found(op, [answer for _ in op.results])

    @staticmethod
    def _constant(op: Op) -> Degree:
        number = constant(op.result) if op.code is Code.CONST else None
        if isinstance(number, float):
            return ZERO if number == 0 else INFINITE if math.isinf(number) else STAYS
        return STAYS

    def loop(self, op: Op) -> None:
        """Find the degrees of a loop's results and of all that is in it; ask for none of the latter before.

        A carry has the degree that it starts with; where it starts at zero, that of what is added to it. A rate that a
        trip names by a value of its own is another one in the next trip.
        """
        (block,) = op.blocks
        inside = defined_in(op)
        own = {value.id for value in inside}
        guess: list[Degree | None] = [self[value] for value in op.operands[3:]]
        if all(self.stays(value) for value in (*op.operands, *captured(op.blocks))):
            guess = [STAYS for _ in guess]
        elif not all(map(self.stays, op.operands[:3])):
            guess = [None for _ in guess]
        for _ in range(3):
            for value in inside:
                if value not in self._given:
                    self._known.pop(value, None)
            self._known[block.arguments[0]] = STAYS
            self._known.update(zip(block.arguments[1:], guess, strict=True))
            found = [self[value] for value in block.yields]
            found = [None if degree is None or degree.within(own) else degree for degree in found]
            joined = [_join(a, b) for a, b in zip(guess, found, strict=True)]
            if joined == guess:
                break
            guess = joined
        else:
            guess = [None for _ in guess]
            for value in inside:
                self._known[value] = None
        self._found(op, guess)

    def _found(self, op: Op, answers: Sequence[Degree | None]) -> None:
        """Of an operation's results, but for those where the shift comes in."""
        for result, answer in zip(op.results, answers, strict=True):
            if result not in self._given:
                self._known[result] = answer

    def _elementary(self, op: Op) -> Degree | None:
        known = [self._known[value] for value in op.operands]
        d = [degree for place, value in enumerate(op.operands) if (degree := self._lanes(op, place, value)) is not None]
        code = op.code
        if code in _EXTREMES and not d and known[0] is not None and known[0].kind is Kind.SHIFT:
            return Degree(Kind.SHIFT, whole(op.result, unit=op.result.id))  # as that of the lane that wins
        if len(d) < len(known):
            return None
        if code is Code.CAST:
            return d[0] if op.result.is_float else None
        if code in _PASSES or code in _EXTREMES:
            return d[0]
        if code is Code.KNOWN:
            return d[0] if d[0] == d[1] else None
        if code in _LINEAR:
            return d[0] if d[0].kind is Kind.SCALE else None
        if code in _ORDER:
            return d[0] if d[0].same(d[1]) else None
        if code is Code.ADD:
            return _added(d[0], d[1])
        if code is Code.SUB:
            return _added(d[0], _negative(d[1]))
        if code is Code.NEG:
            return d[0] if d[0].kind is Kind.SCALE else _negative(d[0])
        if code is Code.ABS:
            return d[0] if d[0].kind is Kind.SCALE else None
        if code in (Code.MUL, Code.DOT):
            return self._multiplied(op, d[0], d[1])
        if code is Code.FMA:
            product = self._multiplied(op, d[0], d[1])
            return None if product is None else _added(product, d[2])
        if code is Code.DIV:
            return self._divided(op, d[0], d[1])
        if code in _EXPONENTIAL and d[0].kind is Kind.SHIFT:
            return _scale(scaled(d[0].rates, _EXPONENTIAL[code]))
        if code in _LOGARITHM and d[0].kind is Kind.SCALE:
            return _shift(scaled(d[0].rates, _LOGARITHM[code]))
        if code in (Code.SQRT, Code.RSQRT) and d[0].kind is Kind.SCALE:
            return _scale(scaled(d[0].rates, 0.5 if code is Code.SQRT else -0.5))
        if code is Code.CMP:
            return self._compared(d[0], d[1])
        if code is Code.SELECT:
            return self._selected(op, d)
        return None

    def _lanes(self, op: Op, place: int, value: Value) -> Degree | None:
        """Of an operand, as the lanes of the result have it."""
        degree = self._known[value]
        rates = None if degree is None else through(op, place, degree.rates)
        return None if degree is None or rates is None else Degree(degree.kind, rates)

    def _multiplied(self, op: Op, a: Degree, b: Degree) -> Degree | None:
        if Kind.ZERO in (a.kind, b.kind):
            return ZERO
        if Kind.INFINITE in (a.kind, b.kind):
            return None
        if Kind.SHIFT not in (a.kind, b.kind):
            return _powers(a, b, 1.0)
        moving, other, factor = (a, b, op.operands[1]) if a.kind is Kind.SHIFT else (b, a, op.operands[0])
        if op.code is not Code.MUL or other.kind is not Kind.STAYS:
            return None
        number = constant(factor)
        if number is not None:
            return _shift(scaled(moving.rates, float(number)))
        return _shift(scaled(moving.rates, 1.0, factor.id)) if factor.shape == () else None

    def _divided(self, op: Op, a: Degree, b: Degree) -> Degree | None:
        if a.kind is Kind.ZERO:
            return ZERO
        if a.kind is Kind.SHIFT:
            divisor = op.operands[1]
            number = constant(divisor)
            if b.kind is not Kind.STAYS or number == 0:
                return None
            if number is not None:
                return _shift(scaled(a.rates, 1 / float(number)))
            return _shift(scaled(a.rates, 1.0, ~divisor.id)) if divisor.shape == () else None
        if a.kind is Kind.INFINITE or b.kind not in (Kind.STAYS, Kind.SCALE):
            return None
        return _powers(a, b, -1.0)

    @staticmethod
    def _compared(a: Degree, b: Degree) -> Degree | None:
        """Order survives equal shifts and scales; a scale does not change the sign, nor a shift what is finite."""
        kinds = {a.kind, b.kind}
        if a.same(b) or kinds == {Kind.SCALE, Kind.ZERO} or kinds == {Kind.SHIFT, Kind.INFINITE}:
            return STAYS
        return None

    def _selected(self, op: Op, d: list[Degree]) -> Degree | None:
        condition, a, b = d
        if condition.kind is not Kind.STAYS:
            return None
        if op.result in self._arms:
            return self._known[self._arms[op.result]]
        for one, side in ((a, op.operands[1]), (b, op.operands[2])):
            if one.kind is Kind.SHIFT and is_guard(op, {bare(side)}):
                return one  # a lane that has nothing holds zeros, whatever it subtracts
        joined = _join(a, b)
        if joined is not None:
            return joined
        # where(mass == 0, 1, mass): lanes without mass hold zeros only, whatever the shift
        test = op.operands[0].producer
        if test is None or test.code is not Code.CMP or not any(map(self._masses, test.operands)):
            return None
        for one, other in ((a, op.operands[2]), (b, op.operands[1])):
            if one.kind is Kind.STAYS and self._masses(other):
                return self._known[other]
        return None


def is_guard(op: Op, guarded: Iterable[Value]) -> bool:
    """Whether this is where(m == -inf, c, m): the maximum, but for rows that have nothing. Of a minimum, inf."""
    if op.code is not Code.SELECT:
        return False
    test = op.operands[0].producer
    kept = {"eq": 2, "ne": 1}.get(test.attributes["predicate"]) if test and test.code is Code.CMP else None
    if test is None or kept is None or not any(bare(op.operands[kept]) is value for value in guarded):
        return False
    fallback = constant(bare(op.operands[3 - kept]))
    sides = [bare(value) for value in test.operands]
    infinite = any(number is not None and math.isinf(number) for number in map(constant, sides))
    return infinite and bare(op.operands[kept]) in sides and fallback is not None and math.isfinite(fallback)


def _join(a: Degree | None, b: Degree | None) -> Degree | None:
    """The degree of what is one or the other."""
    if a is None or b is None:
        return None
    if a.same(b):
        return a
    for one, other in ((a, b), (b, a)):
        if one.kind is Kind.ZERO and other.kind in (Kind.SCALE, Kind.STAYS):
            return other
        if one.kind is Kind.INFINITE and other.kind in (Kind.SHIFT, Kind.STAYS):
            return other
    return None


def _added(a: Degree, b: Degree) -> Degree | None:
    if a.kind is Kind.ZERO:
        return b
    if b.kind is Kind.ZERO:
        return a
    if Kind.INFINITE in (a.kind, b.kind):
        return INFINITE if Kind.SCALE not in (a.kind, b.kind) else None
    if Kind.SCALE in (a.kind, b.kind):
        return a if a.same(b) else None
    return _shift(added(a.rates, b.rates))


def _negative(a: Degree) -> Degree:
    return _shift(scaled(a.rates, -1.0)) if a.kind is Kind.SHIFT else a


def _powers(a: Degree, b: Degree, sign: float) -> Degree | None:
    """Of a * b**sign, both of which stay or scale."""
    return _scale(added(a.rates, b.rates, sign))


def defined_in(op: Op) -> list[Value]:
    """Values that the blocks of an operation define."""
    found: list[Value] = []
    for block in op.blocks:
        found.extend(block.arguments)
        for inner in block.ops:
            found.extend(inner.results)
            found.extend(defined_in(inner))
    return found
