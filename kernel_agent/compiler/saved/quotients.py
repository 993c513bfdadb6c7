"""`use_quotients`: softmax of a row that takes several loops, from its result alone.

The last loop stores y = e / s of e = exp(x - m), where s is the sum of all e, which loops before it found. The maximum
m cancels, so that it may be the one at which s is 1: then e is y. For the derivative of y the loops before are one that
sums what the last one stored, and the backward needs y and its cotangent, as that of torch does. It takes y as it was
rounded when it was stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.saved.meeting import EXPONENTIALS
from kernel_agent.compiler.saved.online import Turn, find_chains
from kernel_agent.compiler.saved.outputs import Place, Saved, load_back, places
from kernel_agent.compiler.saved.softmax import quotient, vanishes_outside
from kernel_agent.compiler.saved.trip import decayed
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, is_constant


@dataclass(frozen=True)
class Power:
    """exp(x - m), or 2 to that power."""

    code: Code
    logit: Value
    shift: Value


@dataclass(frozen=True)
class Quotient:
    """A softmax whose last loop stores e / s."""

    loop: Op
    place: Place
    """Of e / s."""
    power: Power
    """e."""


def use_quotients(kernel: Kernel, differentiated: frozenset[str] | None = None) -> Saved:
    """A kernel whose softmaxes in several loops are known from what they stored; the same where none is proved."""
    found = list(_quotients(kernel, differentiated))
    if not found:
        return Saved(kernel, frozenset())
    names = [one.place.store.base.name for one in found]
    remarks = tuple(f"the exponentials of a softmax are read from {name}" for name in names)
    return Saved(prune(_Known(kernel, found).copy()), frozenset(names), remarks)


def _quotients(kernel: Kernel, differentiated: frozenset[str] | None) -> Iterator[Quotient]:
    written = written_to(kernel.body)
    chains = find_chains(kernel, differentiated, [])
    turns = {chain.last.loop: chain.last for chain in chains if len(chain.turns) == 1}
    for place in places(kernel, []):
        loop = next((op for op in kernel.body.ops if op.code is Code.FOR and place.store in op.blocks[0].ops), None)
        top, under = quotient(place.value)
        power = None if top is None or top.shape != place.value.shape else _power(top)
        if loop is None or power is None or under is None or under.shape or len(place.value.shape) != 1:
            continue
        found = _summed(under, power, turns)
        if found is None:
            continue
        before, summand = found
        indices = (before.blocks[0].arguments[0], loop.blocks[0].arguments[0])
        alike = before.operands[:3] == loop.operands[:3] and _same(summand, power.logit, indices, written)
        if alike and vanishes_outside(kernel, power.logit, place):
            yield Quotient(loop, place, power)


def _power(value: Value) -> Power | None:
    """exp(x - m) for a scalar m."""
    op = bare(value).producer
    if op is None or op.code not in EXPONENTIALS:
        return None
    difference = bare(op.operands[0]).producer
    if difference is None or difference.code is not Code.SUB:
        return None
    return Power(op.code, difference.operands[0], bare(difference.operands[1]))


def _summed(total: Value, power: Power, turns: Mapping[Op, Turn]) -> tuple[Op, Value] | None:
    """The loop that adds up exp(x - m) to a scalar, and its x; None where that is not what the scalar is."""
    total = bare(total)
    op = total.producer
    if op is None:
        return None
    if op.code is Code.FOR:
        maximum = power.shift if power.shift.producer is op else None
        return _loop_sum(op, op.results.index(total), power, turns, maximum)
    if op.code is not Code.SUM or len(op.operands[0].shape) != 1:
        return None
    lanes = bare(op.operands[0])
    rescaled = lanes.producer
    if rescaled is not None and rescaled.code is Code.FOR:
        return _loop_sum(rescaled, rescaled.results.index(lanes), power, turns, None)
    if rescaled is None or rescaled.code is not Code.MUL:
        return None
    # Each lane has a maximum of its own, and its sum decays once more, to the largest of them.
    for mass, decay in (rescaled.operands, rescaled.operands[::-1]):
        loop, factor, largest = mass.producer, _power(decay), power.shift.producer
        if loop is None or loop.code is not Code.FOR or factor is None or largest is None:
            continue
        own = bare(factor.logit)
        reduced = largest.code is Code.REDUCE_MAX and bare(largest.operands[0]) is own
        if reduced and factor.shift is power.shift and factor.code is power.code and own.producer is loop:
            return _loop_sum(loop, loop.results.index(mass), power, turns, own)
    return None


def _loop_sum(
    loop: Op, place: int, power: Power, turns: Mapping[Op, Turn], maximum: Value | None
) -> tuple[Op, Value] | None:
    """The loop, and x, where a carry starts at zero and adds up exp(x - m): with `maximum`, a result of the loop, at
    the largest x so far, without at the m that is there before."""
    (block,) = loop.blocks
    carry, turn = block.arguments[1 + place], turns.get(loop)
    decay, terms = decayed(block.yields[place], carry)
    if not is_constant(bare(loop.operands[3 + place]), 0):
        return None
    if maximum is None:
        terms = [term for term in terms if term is not carry]
        shifts = {power.shift}
        if decay is not None or len(terms) != 1 or power.shift.producer is loop:
            return None
    else:
        if turn is None or maximum is not loop.results[turn.place] or place not in turn.decays or len(terms) != 1:
            return None
        shifts = {bare(value) for value in turn.maxima}
    term = bare(terms[0])
    if term.producer is not None and term.producer.code is Code.SUM and not carry.shape:
        term = term.producer.operands[0]
        if len(term.shape) != 1:
            return None
    elif not carry.shape:
        return None
    found = _power(term)
    if found is None or found.code is not power.code or found.shift not in shifts:
        return None
    return loop, found.logit


def _same(one: Value, other: Value, indices: tuple[Value, Value], written: frozenset[Value]) -> bool:
    """Whether two values are the same number in the trips of two loops with equal indices."""
    if one is other or (one, other) == indices:
        return True
    left, right = one.producer, other.producer
    if left is None or right is None or left.code is not right.code or left.attributes != right.attributes:
        return False
    if left.code in EFFECTS or left.blocks or (left.code is Code.LOAD and left.base in written):
        return False
    pairs = zip(left.operands, right.operands, strict=False)
    return len(left.operands) == len(right.operands) > 0 and all(_same(a, b, indices, written) for a, b in pairs)


class _Known(Copier):
    """Divides what is known by what is known to be 1."""

    def __init__(self, source: Kernel, found: list[Quotient]) -> None:
        super().__init__(source)
        self.by_loop: dict[Op, list[Quotient]] = {}
        for one in found:
            self.by_loop.setdefault(one.loop, []).append(one)
        self.by_value = {one.place.value: one for one in found}
        self.sums: dict[Value, Value] = {}
        """By quotient: the sum of its exponentials."""

    def loop(self, op: Op) -> None:
        """Before a loop that stores quotients, one that sums them."""
        if not self.slicing:
            for one in self.by_loop.get(op, ()):
                self.sums[one.place.value] = self.b.known(self.sum(one), self.b.const(1.0, one.place.value.element))
        super().loop(op)

    def sum(self, one: Quotient) -> Value:
        """Of the exponentials of all trips."""
        b = self.b
        index = one.loop.blocks[0].arguments[0]

        def body(trip: Value, carries: list[Value]) -> list[Value]:
            self[index] = trip
            return [b.add(carries[0], b.sum(self.exponential(b, one), 0))]

        start, stop, step = self.all(one.loop.operands[:3])
        zero = b.const(0.0, one.place.value.element)
        (total,) = b.loop((start, stop, step), [zero], body, index_name=index.name, names=["total"])
        return total

    def exponential(self, b: Builder, one: Quotient) -> Value:
        """exp(x), known to be what was stored."""
        return b.known(b.unary(one.power.code, self[one.power.logit]), load_back(self, one.place, other=0.0))

    def op(self, op: Op) -> None:
        """A quotient that is stored."""
        one = self.by_value.get(op.results[0]) if op.results else None
        if one is None or op.results[0] not in self.by_value or one.place.value not in self.sums:
            super().op(op)
            return
        self[op.result] = self.b.div(self.exponential(self.b, one), self.sums[one.place.value])
