"""`settle_maxima`: softmax over values that are at hand at once, without the derivative of the maximum it subtracts.

It cancels, and computed as written it is a search for where the maximum was, and a difference of sums. Where the
forward stored the result y = e / s of e = exp(x - m), the maximum may moreover be the one at which s is 1: then e is y,
and the backward needs neither x nor a second look for its maximum. Where it stored m + log(s), the maximum is that, and
neither is searched nor summed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernel_agent.compiler.saved.degree import Degrees, gauge, is_guard
from kernel_agent.compiler.saved.gauge import log_sums
from kernel_agent.compiler.saved.joint import Joint, Ties
from kernel_agent.compiler.saved.lanes import Lanes, conditions
from kernel_agent.compiler.saved.online import examine
from kernel_agent.compiler.saved.outputs import Place, Saved, load_back, places
from kernel_agent.compiler.saved.signs import is_positive
from kernel_agent.compiler.saved.slots import is_start_outside
from kernel_agent.compiler.saved.trip import NotOneError
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, bare, constant, is_constant


@dataclass
class _Plan:
    maxima: set[Value] = field(default_factory=set)
    """Without derivative."""
    numbers: dict[Value, Place] = field(default_factory=dict)
    """Exponentials that are what was stored."""
    ones: set[Value] = field(default_factory=set)
    """Sums that are 1 for these, or for a log-sum-exp."""
    totals: dict[Value, Total] = field(default_factory=dict)
    """Maxima that log-sum-exps stand for."""


@dataclass(frozen=True)
class Total:
    """Memory that holds factor * m + log(s)."""

    place: Place
    factor: float


def settle_maxima(
    kernel: Kernel,
    differentiated: frozenset[str] | None = None,
    joint: Joint | None = None,
    lost: frozenset[str] = frozenset(),
) -> Saved:
    """A kernel whose largest values have no derivative, as far as nothing depends on them.

    `differentiated`: arguments whose cotangents are not zero; None for all. `joint`: those that may follow one. `lost`:
    those that are overwritten later, and not read.
    """
    plan = _Plan()
    ties = Ties.of(kernel, joint)
    remarks: list[str] = []
    uses, lanes = Uses.of(kernel), Lanes(kernel)
    stored = [place for place in places(kernel, []) if not place.lossy and place.store.base.name not in lost]
    for block, op, maximum in _candidates(kernel.body):
        degrees = _degrees(block, maximum)
        if not _settled(block, op, degrees, differentiated, ties):
            continue
        plan.maxima.add(maximum)
        for place in stored:
            if place.store in block.ops and _use_result(
                kernel, plan, uses, degrees, {maximum, *_guards(block, maximum)}, place
            ):
                remarks.append(f"the exponentials of a softmax are read from {place.store.base.name}")
                break
        else:
            for place in stored if op.code is Code.REDUCE_MAX else ():
                if place.store in block.ops and _use_total(plan, lanes, degrees, maximum, place):
                    remarks.append(f"a log-sum-exp is read from {place.store.base.name}: no maximum, no sum")
                    break
    if not plan.maxima:
        return Saved(kernel, frozenset())
    used = (*plan.numbers.values(), *(total.place for total in plan.totals.values()))
    read = frozenset(place.store.base.name for place in used)
    return Saved(_Settled(kernel, plan).copy(), read, tuple(remarks))


def maxima(kernel: Kernel) -> Iterator[Degrees]:
    """How values answer to each of the largest values of a kernel, of what runs after it in the kernel's own block."""
    for block, op, maximum in _candidates(kernel.body):
        if block is kernel.body and op.code is Code.REDUCE_MAX:
            yield _degrees(block, maximum)


def _degrees(block: Block, maximum: Value) -> Degrees:
    return Degrees(dict.fromkeys((maximum, *_guards(block, maximum)), gauge(maximum)))


def _guards(block: Block, maximum: Value) -> set[Value]:
    return {inner.result for inner in block.ops if inner.results and is_guard(inner, {maximum})}


def _candidates(block: Block) -> list[tuple[Block, Op, Value]]:
    """Largest values: of a tile, or of a loop that keeps the largest so far; with the block they are in."""
    found: list[tuple[Block, Op, Value]] = []
    for op in block.ops:
        if op.code is Code.REDUCE_MAX and op.result.is_float:
            found.append((block, op, op.result))
        if op.code is Code.FOR:
            carries, yields = op.blocks[0].arguments[1:], op.blocks[0].yields
            for result, carry, last in zip(op.results, carries, yields, strict=True):
                maker = bare(last).producer
                if (
                    result.is_float
                    and maker is not None
                    and maker.code is Code.MAX
                    and carry in map(bare, maker.operands)
                ):
                    found.append((block, op, result))
        for inner in op.blocks:
            found.extend(_candidates(inner))
    return found


def _settled(block: Block, op: Op, degrees: Degrees, differentiated: frozenset[str] | None, ties: Ties | None) -> bool:
    """Whether what a block stores and yields after `op` stays when its result shifts."""
    try:
        for later in block.ops[block.ops.index(op) + 1 :]:
            examine(later, degrees, differentiated, ties)
    except NotOneError:
        return False
    return all(map(degrees.stays, block.yields))


def _use_result(kernel: Kernel, plan: _Plan, uses: Uses, degrees: Degrees, maxima: set[Value], place: Place) -> bool:
    """Take y = e / s for e where e is all that the maximum is for; whether that is so."""
    top, under = quotient(place.value)
    if top is None or under is None or top.producer is None or top.shape != place.value.shape:
        return False
    if top.producer.code not in (Code.EXP, Code.EXP2) or degrees.stays(top) or degrees.stays(under):
        return False
    difference = bare(top.producer.operands[0])
    maker = difference.producer
    if maker is None or maker.code is not Code.SUB or bare(maker.operands[1]) not in maxima:
        return False
    maximum = bare(maker.operands[1])
    if under.shape != maximum.shape or not is_positive(under) or not _only_for(uses, difference, {top}):
        return False  # of what is negative no maximum makes 1, and conditions may ask for its sign
    allowed = {difference, *maxima}
    if any(not _only_for(uses, value, allowed) for value in maxima):
        return False
    if not vanishes_outside(kernel, maker.operands[0], place, top):
        return False
    plan.numbers[top] = place
    plan.ones.add(under)
    return True


def _use_total(plan: _Plan, lanes: Lanes, degrees: Degrees, maximum: Value, place: Place) -> bool:
    """Take factor * m + log(s), if a value that was stored is that, for the maximum; whether it is."""
    if place.value.shape != maximum.shape or not degrees.stays(place.value):
        return False
    for found in log_sums(place.value, set()):
        mass = bare(found.mass)
        if found.number is not maximum or mass.shape != maximum.shape or not is_positive(mass) or degrees.stays(mass):
            continue
        if lanes.confined(maximum, place.store.mask):
            plan.totals[maximum] = Total(place, found.factor)
            plan.ones.add(mass)
            return True
    return False


def quotient(value: Value) -> tuple[Value | None, Value | None]:
    """e and s of e / s, or of e times 1 / s."""
    op = value.producer
    if op is None:
        return None, None
    if op.code is Code.DIV:
        return bare(op.operands[0]), bare(op.operands[1])
    if op.code is Code.MUL:
        for one, other in (op.operands, op.operands[::-1]):
            inverse = bare(other).producer
            if inverse is not None and inverse.code is Code.DIV and is_constant(inverse.operands[0], 1):
                return bare(one), bare(inverse.operands[1])
    return None, None


def _only_for(uses: Uses, value: Value, readers: set[Value]) -> bool:
    """Whether a value is read, behind changes of shape, for nothing but `readers` and tests."""
    if value in uses.yielded:
        return False
    for op in uses[value]:
        if not op.results:
            return False
        if op.result in readers or op.code is Code.CMP:
            continue
        if bare(op.result) is not value or not _only_for(uses, op.result, readers):
            return False
    return True


def vanishes_outside(kernel: Kernel, x: Value, place: Place, reader: Value | None = None) -> bool:
    """Whether x is -inf, so that its exponential is zero, wherever the result was not stored.

    `reader`: what is made of x. Rows that have no part in what is made of that are none that x must vanish in.
    """
    if place.store.mask is None:
        return True
    op = x.producer
    labels = tuple(range(len(x.shape)))
    if op is None or x.shape != place.value.shape:
        return False
    wanted = conditions(place.store.mask, labels)
    if op.code is Code.LOAD and op.mask is not None and op.other is not None:
        return constant(bare(op.other)) == -math.inf and wanted <= conditions(op.mask, labels)
    chosen = op.code is Code.SELECT and constant(bare(op.operands[2])) == -math.inf
    if chosen and wanted <= conditions(op.operands[0], labels):
        return True
    if op.code is Code.CAST:
        return vanishes_outside(kernel, op.operands[0], place, reader)
    if op.code is Code.MUL:
        # By a scalar that is not positive, -inf becomes inf or NaN, and so is the whole row of the forward.
        sides = (op.operands, op.operands[::-1])
        return any(not other.shape and vanishes_outside(kernel, one, place, reader) for one, other in sides)
    if op.code in (Code.FOR, Code.SELECT):
        return is_start_outside(kernel, x, place.store.mask, -math.inf, reader)
    return False


class _Settled(Copier):
    """Cuts maxima off, and knows exponentials and their sums."""

    def __init__(self, source: Kernel, plan: _Plan) -> None:
        super().__init__(source)
        self.plan = plan
        self.stored = {total.place.value: total.place for total in plan.totals.values()}

    def op(self, op: Op) -> None:
        super().op(op)
        b = self.b
        for result in op.results:
            if result in self.plan.totals:
                total = self.plan.totals[result]
                number = load_back(self, total.place, other=math.inf)
                self[result] = b.known(b.zero(result), b.mul(number, b.const(1 / total.factor, number.element)))
            elif result in self.stored:
                self[result] = b.known(self[result], load_back(self, self.stored[result], other=math.inf))
            elif result in self.plan.maxima:
                self[result] = b.known(b.zero(result), self[result])
            elif result in self.plan.ones:
                self[result] = b.known(self[result], b.const(1.0, result.element))
            elif result in self.plan.numbers:
                place = self.plan.numbers[result]
                self[result] = b.known(self[result], load_back(self, place, other=0.0))
