"""`factored`: what every term of a loop's sum is multiplied with, multiplied once after the loop.

sum(c * x) = c * sum(x): the trips do less, and where c comes out of an earlier loop, the sum no longer waits for that.
Products are sums too: the scale of attention leaves its loops, whose tiles then are what the next product takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.order import adds_up
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, is_constant, unspread

_PASSES = frozenset((Code.SUM, Code.EXPAND, Code.TRANS, Code.BROADCAST, Code.FULL, Code.CAST))


@dataclass(frozen=True)
class Factors:
    """Scalars from outside of a loop that a value is a multiple of."""

    times: tuple[Value, ...] = ()
    over: tuple[Value, ...] = ()
    negative: bool = False

    def __bool__(self) -> bool:
        return bool(self.times or self.over or self.negative)

    def joined(self, other: Factors) -> Factors:
        """Of a product."""
        return Factors(self.times + other.times, self.over + other.over, self.negative is not other.negative)


NONE = Factors()


@dataclass
class Sum:
    """A carry of a loop that adds up multiples of scalars."""

    place: int
    term: Value
    subtracted: bool
    factors: Factors


@dataclass
class _Found:
    sums: dict[Op, list[Sum]] = field(default_factory=dict)


def factored(kernel: Kernel) -> Kernel:
    """A kernel whose loops add up terms without common factors."""
    uses = Uses.of(kernel)
    found = _Found()
    for op in kernel.ops:
        if op.code is Code.FOR:
            sums = [sum_ for place in range(len(op.results)) if (sum_ := _sum(uses, op, place))]
            if sums:
                found.sums[op] = sums
    return _Factored(kernel, found).copy() if found.sums else kernel


def _sum(uses: Uses, loop: Op, place: int) -> Sum | None:
    """A carry that starts at zero and gets multiples of scalars added."""
    (block,) = loop.blocks
    carry, last = block.arguments[1 + place], block.yields[place].producer
    start = unspread(loop.operands[3 + place])
    if not carry.is_float or not is_constant(start, 0) or last is None or last not in block.ops:
        return None
    if last.code not in (Code.ADD, Code.SUB) or carry not in last.operands or not adds_up(uses, loop, place):
        return None
    term = last.operands[0] if last.operands[1] is carry else last.operands[1]
    if term is carry or (last.code is Code.SUB and last.operands[0] is not carry):
        return None
    factors = _factors(term, block.arguments[0].depth)
    return Sum(place, term, last.code is Code.SUB, factors) if factors else None


def _factors(value: Value, depth: int) -> Factors:
    """Of a value computed in a loop whose body is at `depth`."""
    op = value.producer
    if op is None or value.depth < depth:
        return NONE
    if op.code in _PASSES:
        return _factors(op.operands[0], depth) if op.operands[0].is_float else NONE
    if op.code is Code.DOT:
        return _factors(op.operands[0], depth).joined(_factors(op.operands[1], depth))
    if op.code is Code.NEG:
        return Factors(negative=True).joined(_factors(op.operands[0], depth))
    if op.code is Code.MUL:
        a, b = op.operands
        for one, other in ((a, b), (b, a)):
            if _is_outer(one, depth):
                return Factors(times=(one,)).joined(_factors(other, depth))
        return _factors(a, depth).joined(_factors(b, depth))
    if op.code is Code.DIV:
        a, b = op.operands
        return Factors(over=(b,)).joined(_factors(a, depth)) if _is_outer(b, depth) else _factors(a, depth)
    if op.code is Code.SELECT and is_constant(op.operands[2], 0):
        return _factors(op.operands[1], depth)
    return NONE


def _is_outer(value: Value, depth: int) -> bool:
    """Whether a value is a scalar that all trips share."""
    return value.shape == () and value.is_float and (value.depth < depth or constant(value) is not None)


def _without(b: Builder, copier: Copier, value: Value, depth: int) -> Value:
    """The value without its factors, in the copy."""
    op = value.producer
    if op is None or value.depth < depth or not _factors(value, depth):
        return copier[value]
    inner = op.operands

    def rest(operand: Value) -> Value:
        return _without(b, copier, operand, depth)

    if op.code is Code.NEG:
        return rest(inner[0])
    if op.code is Code.MUL:
        for one, other in ((inner[0], inner[1]), (inner[1], inner[0])):
            if _is_outer(one, depth):
                return rest(other)
        return b.mul(rest(inner[0]), rest(inner[1]))
    if op.code is Code.DIV:
        return rest(inner[0]) if _is_outer(inner[1], depth) else b.div(rest(inner[0]), copier[inner[1]])
    if op.code is Code.DOT:
        return b.dot(rest(inner[0]), rest(inner[1]), op.attributes["precision"], value.element)
    if op.code is Code.SELECT:
        return b.select(copier[inner[0]], rest(inner[1]), copier[inner[2]])
    found = b.again(op, [rest(inner[0])])
    assert isinstance(found, Value)
    return found


class _Factored(Copier):
    """Adds up what is left, and multiplies the results."""

    def __init__(self, source: Kernel, found: _Found) -> None:
        super().__init__(source)
        self.sums = found.sums

    def loop(self, op: Op) -> None:
        sums = {sum_.place: sum_ for sum_ in self.sums.get(op, ())}
        if not sums:
            super().loop(op)
            return
        (block,) = op.blocks
        b = self.b
        depth = block.arguments[0].depth
        lasts = {block.yields[place].producer: place for place in sums}

        def body(index: Value, inner: list[Value]) -> list[Value]:
            self.enter(block.arguments, (index, *inner))
            for inside in block.ops:
                place = lasts.get(inside)
                if place is None:
                    self.op(inside)
                    continue
                term = sums[place].term
                b.hint = inside.result.name
                self[inside.result] = b.add(inner[place], b.whole(_without(b, self, term, depth), term.shape))
            return self.all(block.yields)

        start, stop, step = self.all(op.operands[:3])
        carries = [self.whole(value) for value in op.operands[3:]]
        names = [value.name for value in block.arguments]
        found = b.loop((start, stop, step), carries, body, index_name=names[0], names=names[1:], **self.attributes(op))
        for place, (old, value) in enumerate(zip(op.results, found, strict=True)):
            new = value
            if place in sums:
                factors = sums[place].factors
                for factor in factors.times:
                    new = b.mul(new, self[factor])
                for factor in factors.over:
                    new = b.div(new, self[factor])
                if factors.negative is not sums[place].subtracted:
                    new = b.neg(new)
            self[old] = new
