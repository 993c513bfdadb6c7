"""`use_gauge`: online softmax with one maximum for all trips, so that its derivative needs no tape.

The loop is written anew with M for the running maximum: l = sum(exp(X - M)), acc = sum(exp(X - M) V), whose trips
are independent. M has no derivative (see `online`). Where the forward stored m + log(l), M is that: l is 1, and this
is the backward of FlashAttention-2 (Dao, 2023). Else M is the final maximum, and the loop that found it stays,
to give the numbers that the new one is KNOWN to end in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.saved.degree import is_guard
from kernel_agent.compiler.saved.joint import Joint
from kernel_agent.compiler.saved.lanes import Lanes
from kernel_agent.compiler.saved.meeting import Meeting, met
from kernel_agent.compiler.saved.online import Chain, Turn, find_chains
from kernel_agent.compiler.saved.outputs import Place, Saved, load_back, places
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import has_effects
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, constant


@dataclass(frozen=True)
class Normaliser:
    """Memory that holds factor * m + log(l)."""

    place: Place
    factor: float
    mass: int
    """l, among the carries of the last turn."""
    guarded: bool = False
    """It is infinite where l is zero."""
    meeting: Meeting | None = None
    """Of lanes that keep maxima of their own: how they end in m and l."""
    finite: bool = True
    """Where nothing counts it is not minus infinity."""


def use_gauge(
    kernel: Kernel,
    differentiated: frozenset[str] | None = None,
    joint: Joint | None = None,
    lost: frozenset[str] = frozenset(),
) -> Saved:
    """A kernel whose online softmaxes have one maximum each, as far as that is proved; remarks say where it is not. Of
    several in one loop one is turned after the other.

    `differentiated`: arguments whose cotangents are not zero; None for all. `joint`: those that may follow it. `lost`:
    those that are overwritten later, and not read.
    """
    remarks: list[str] = []
    chains = find_chains(kernel, differentiated, remarks, joint)
    if not chains:
        return Saved(kernel, frozenset(), tuple(remarks))
    lanes = Lanes(kernel)
    stored = [place for place in places(kernel, []) if not place.lossy and place.store.base.name not in lost]
    turned = _Turned(kernel)
    for chain in chains:
        turned.plan(chain, [place for place in stored if _fits(lanes, chain, place)])
    try:
        found = turned.copy()
    except CannotDerive as reason:
        remarks.append(f"a running maximum keeps its place in the derivative: {reason}")
        return Saved(kernel, frozenset(), tuple(remarks))
    others = use_gauge(found, differentiated, joint, lost)
    read = frozenset(turned.read) | others.read
    return Saved(others.kernel, read, tuple(dict.fromkeys((*remarks, *turned.remarks, *others.remarks))))


class _Turned(Copier):
    """Writes the loops of chains anew."""

    def __init__(self, source: Kernel, b: Builder | None = None) -> None:
        super().__init__(source, b)
        self.read: set[str] = set()
        self.remarks: list[str] = []
        self.chains: dict[Op, tuple[Chain, Turn]] = {}
        self.normalisers: dict[Chain, Normaliser | None] = {}
        self.stored: dict[Value, Place] = {}
        self.gauges: dict[Chain, Value] = {}
        self.steady: set[Value] = set()
        """What stands for something else in loops that are turned: maxima, and factors of earlier trips."""
        self.joined: set[Value] = set()
        """Sums of all that lanes have, which are 1."""
        self.ends: dict[Chain, dict[int, Value]] = {}
        """Numbers that the last turn ends in, by carry."""

    def plan(self, chain: Chain, stored: list[Place]) -> None:
        """Turn a chain. `stored`: what can be loaded in place of its results."""
        self.chains.update({turn.loop: (chain, turn) for turn in chain.turns})
        self.normalisers[chain] = next(filter(None, (_normaliser(chain, place) for place in stored)), None)
        self.stored.update({place.value: place for place in stored})

    def op(self, op: Op) -> None:
        if not self.steady.isdisjoint(op.results):
            return
        if op not in self.chains:
            super().op(op)
            for mass in self.joined.intersection(op.results):
                self[mass] = self.b.known(self[mass], self.b.const(1.0, mass.element))
            return
        chain, turn = self.chains[op]
        if turn is chain.turns[0]:
            self._choose(chain)
        self._write(chain, turn)

    def _choose(self, chain: Chain) -> None:
        """Find the maximum to take, and the numbers that the turns end in."""
        b, last = self.b, chain.last
        maximum = chain.maximum
        called = f"`{maximum.name}`" if maximum.name else "a running maximum"
        normaliser = self.normalisers[chain]
        if normaliser is not None:
            place = normaliser.place
            number = load_back(self, place, other=math.inf)
            number = b.mul(number, b.const(1 / normaliser.factor, number.element))
            if not normaliser.finite:
                lowest = b.const(-math.inf, number.element)
                number = b.select(b.compare("eq", number, lowest), b.const(math.inf, number.element), number)
            self.read.add(place.store.base.name)
            mass = last.loop.results[normaliser.mass]
            one = b.const(1.0, mass.element)
            if normaliser.guarded:
                one = b.select(b.compare("eq", number, b.const(math.inf, number.element)), b.zero(one), one)
            self.ends[chain] = {normaliser.mass: one}
            if normaliser.meeting is not None:
                self.ends[chain] = {}
                number = self._meet(normaliser.meeting, number)
            self.remarks.append(f"{called} is the log-sum-exp read from {place.store.base.name}: no maximum, no tape")
        else:
            if any(has_effects(turn.loop) for turn in chain.turns):
                raise CannotDerive("its loop writes to memory")
            before = self.aside()
            finals = {place: self._final(before, last.loop.results[place]) for place in last.degrees}
            number = finals.pop(last.place)
            self.ends[chain] = {place: value for place, value in finals.items() if place in last.decays}
            self.remarks.append(f"{called} is the final one in every trip: no tape")
        self.gauges[chain] = b.known(b.zero(number), number)

    def _meet(self, meeting: Meeting, number: Value) -> Value:
        """Let all lanes take the maximum that they meet at; it is that of every one of them, as they have it."""
        b = self.b
        self[meeting.highest] = b.known(b.zero(number), number)
        self[meeting.factor] = b.const(1.0, meeting.factor.element)
        self.steady |= {meeting.highest, meeting.factor}
        self.joined.add(meeting.mass)
        return b.expand(number, meeting.axis)

    def _final(self, before: Copier, value: Value) -> Value:
        """What a chain ends in: loaded where it was stored, else as the forward computes it."""
        if value in self.stored:
            self.read.add(self.stored[value].store.base.name)
            return load_back(self, self.stored[value])
        return before[value]

    def _write(self, chain: Chain, turn: Turn) -> None:
        """A turn with the one maximum."""
        b, gauge = self.b, self.gauges[chain]
        (block,) = turn.loop.blocks
        places = [place for place in range(len(turn.loop.results)) if place != turn.place]
        starts = [b.whole(self._start(chain, turn, place), turn.start(place).shape) for place in places]
        start, stop, step = self.all(turn.loop.operands[:3])

        def body(index: Value, inner: list[Value]) -> Sequence[Value]:
            self[block.arguments[0]] = index
            for place, value in zip(places, inner, strict=True):
                self[block.arguments[1 + place]] = value
            self[turn.old] = b.whole(gauge, turn.old.shape)
            for maximum in turn.maxima:
                maker = maximum.producer
                if maker is None or not is_guard(maker, turn.maxima):
                    self[maximum] = b.whole(gauge, maximum.shape)
                    self.steady.add(maximum)
            for alpha in turn.alphas:
                self[alpha] = b.const(1.0, alpha.element)
                self.steady.add(alpha)
            for op in block.ops:
                if has_effects(op):
                    self.op(op)
            return [self[block.yields[place]] for place in places]

        names = [block.arguments[1 + place].name for place in places]
        found = b.loop(
            (start, stop, step),
            starts,
            body,
            index_name=block.arguments[0].name,
            names=names,
            **turn.loop.attributes,
        )
        self[turn.loop.results[turn.place]] = b.whole(gauge, turn.old.shape)
        ends = self.ends[chain] if turn is chain.last else {}
        for place, value in zip(places, found, strict=True):
            self[turn.loop.results[place]] = b.known(value, ends[place]) if place in ends else value

    def _start(self, chain: Chain, turn: Turn, place: int) -> Value:
        """What a carry starts with at the chosen maximum: a first turn's start decays from its own."""
        start = turn.start(place)
        if turn is not chain.turns[0] or place not in turn.decays:
            return self[start]
        known = constant(bare(start))
        first = turn.start(turn.place)
        if known == 0 or constant(bare(first)) == -math.inf:
            return self.b.zero(start)
        aside = self.aside()
        aside[turn.old] = self[first]
        for maximum in turn.maxima:
            aside[maximum] = self.gauges[chain]
        return self.b.mul(self[start], aside[turn.decays[place]])


def _fits(lanes: Lanes, chain: Chain, place: Place) -> bool:
    """Whether a stored value may stand for results of a chain: in its block, for all lanes that matter."""
    results = {result for turn in chain.turns for result in turn.loop.results}
    if place.store not in chain.block.ops:
        return False
    if place.store.mask is None:
        return True
    if len(place.value.shape) < len(chain.maximum.shape):
        axis = _axis_of_lanes(chain)
        maxima = [maximum for turn in chain.turns for maximum in turn.maxima]
        return axis is not None and all(lanes.confined(value, place.store.mask, axis) for value in maxima)
    moved = {maximum for turn in chain.turns for maximum in turn.maxima} | {
        result for result in results if result.shape == place.value.shape
    }
    return all(lanes.confined(value, place.store.mask) for value in moved if value.shape == place.value.shape)


def _normaliser(chain: Chain, place: Place) -> Normaliser | None:
    """A stored value as factor * m + log(l) of the final m and a carry l that scales; None where it is not."""
    if not chain.of_largest or not chain.degrees().stays(place.value):
        return None
    total, finite = _where_any(place.value)
    total, empty = _finite(total)
    for found in log_sums(total, {chain.maximum}):
        factor, source, mass = found.factor, found.number, _unguarded(found.mass, chain)
        if empty not in (None, mass):
            continue
        meeting = None if source is chain.maximum else met(chain.block, chain.maximum, mass)
        if source is not (chain.maximum if meeting is None else meeting.highest) or place.value.shape != source.shape:
            continue
        own = mass if meeting is None else meeting.of_each
        for number in chain.last.decays:
            if chain.last.loop.results[number] is own:
                return Normaliser(place, factor, number, empty is not None, meeting, finite)
    return None


def _axis_of_lanes(chain: Chain) -> int | None:
    """That lanes with maxima of their own meet along; None where there is not one such axis."""
    ops = [op for op in chain.block.ops if op.code is Code.REDUCE_MAX and bare(op.operands[0]) is chain.maximum]
    axes = {op.attributes["axis"] for op in ops}
    return axes.pop() if len(axes) == 1 else None


def _where_any(value: Value) -> tuple[Value, bool]:
    """x of where(condition, x, -inf), and whether it is no such choice."""
    op = bare(value).producer
    if op is None or op.code is not Code.SELECT or constant(bare(op.operands[2])) != -math.inf:
        return value, True
    return bare(op.operands[1]), False


@dataclass(frozen=True)
class LogSum:
    """factor * number + log(mass), the logarithm to any base."""

    factor: float
    number: Value
    mass: Value


def log_sums(value: Value, guarded: set[Value]) -> Iterator[LogSum]:
    """A value as a log-sum-exp: in both orders, where both summands may be the logarithm. `guarded`: see `multiple`."""
    op = value.producer
    if op is None or op.code is not Code.ADD:
        return
    for one, other in (op.operands, op.operands[::-1]):
        factor, number = multiple(one, guarded)
        _, log = multiple(other, set())
        if factor and log.producer is not None and log.producer.code in (Code.LOG, Code.LOG2):
            yield LogSum(factor, number, log.producer.operands[0])


def multiple(value: Value, guarded: set[Value]) -> tuple[float, Value]:
    """A value as a constant times another, and that without guards, if it is one of `guarded`."""
    factor = 1.0
    while True:
        value = bare(value)
        op = value.producer
        if op is None:
            return factor, value
        if op.code in (Code.MUL, Code.DIV) and constant(op.operands[1]) is not None:
            number = float(constant(op.operands[1]) or 0.0)
            if number == 0.0:
                return factor, value
            factor = factor * number if op.code is Code.MUL else factor / number
            value = op.operands[0]
        elif is_guard(op, guarded):
            value = op.operands[1] if bare(op.operands[1]) in guarded else op.operands[2]
        else:
            return factor, value


def _finite(value: Value) -> tuple[Value, Value | None]:
    """x and l of where(l == 0, inf, x); another value, and None."""
    op = bare(value).producer
    test = op.operands[0].producer if op is not None and op.code is Code.SELECT else None
    kept = {"eq": 2, "ne": 1}.get(test.attributes["predicate"]) if test and test.code is Code.CMP else None
    if op is None or test is None or kept is None or constant(bare(op.operands[3 - kept])) != math.inf:
        return value, None
    masses = [bare(side) for side in test.operands if constant(bare(side)) != 0]
    return (bare(op.operands[kept]), masses[0]) if len(masses) == 1 else (value, None)


def _unguarded(value: Value, chain: Chain) -> Value:
    """l of where(l == 0, 1, l), or of such a choice that only l comes of to where something is stored."""
    value = bare(value)
    value = bare(chain.arms.get(value, value))
    op = value.producer
    if op is None or op.code is not Code.SELECT:
        return value
    test = op.operands[0].producer
    if test is None or test.code is not Code.CMP:
        return value
    sides = {bare(side) for side in test.operands}
    kept = [bare(side) for side in op.operands[1:] if bare(side) in sides and constant(bare(side)) is None]
    return kept[0] if len(kept) == 1 else value
