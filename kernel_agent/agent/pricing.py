"""What a plan costs in memory traffic at the user's largest required shape, before a line of it is written.

Bytes, addresses and contributions come from counting the user's own forward at that shape (`docs/cost.md`): where its
programs load an element of an input n times, the gradient of that element is a sum of n terms. For a gradient g of n
elements, all in float32 while they are summed:

    floor      cotangents + what the plan reads of `saved`, each once + g written once
    atomics    one add per load of the forward; 8 n bytes more for zeroing and reading back, 16 n and a cast for
               gradients of fewer than four bytes
    partials   one sum per load of the forward, or, with a persistent grid of two programs per multiprocessor, at most
               that many sums per element; each written and read again: 8 bytes
    scratch    what a launch writes for a later one, as the plan states it: twice its bytes, in the plan as a whole

What is computed again reads what the plan says it reads of `saved`: that is in the floor. Rereads that a cache serves,
launches and arithmetic are not priced, and what cannot be counted says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kernel_agent.agent.counted import CountedForward
from kernel_agent.agent.plan import ExtraSaved, GradientPlan, GradientPrice, Plan, Reduction
from kernel_agent.agent.planchecks import stays_in_one_program
from kernel_agent.agent.sizes import size_of
from kernel_agent.errors import KernelAgentError
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, KernelSpec
from kernel_agent.quantities import amount, duration, size

SUM_BYTES = 4
"""Sums are kept in float32."""

PROGRAMS_PER_SM = 2
"""Of a persistent grid."""

_MANY = re.compile(r"\b(share|several|many|group|block of|chunk|strip|walk|loop|stride|persistent)", re.IGNORECASE)
"""Words of an owner that takes more than one of the forward's tiles."""


@dataclass(frozen=True)
class Terms:
    """How the terms of one gradient are spread over the forward's programs."""

    addresses: int
    """Elements that are loaded."""
    loads: int
    """Loads of them, each a term of the gradient."""

    @property
    def each(self) -> str:
        """Terms per element, in words."""
        mean = self.loads / self.addresses
        return f"{mean:,.0f}" if mean >= 10 else f"{mean:.3g}"


@dataclass(frozen=True)
class Way:
    """One way to bring the terms of a gradient together."""

    name: str
    extra_bytes: int
    """Beyond the floor."""
    words: str = ""
    """What else there is to say."""
    workspace_bytes: int | None = None
    atomics: int | None = None
    l2_s: float = 0.0
    """Least time of the atomics in L2."""


def price_plan(
    spec: KernelSpec, plan: Plan, facts: ForwardFacts | None, count: Callable[[], CountedForward]
) -> tuple[GradientPrice, ...]:
    """The plan as a whole, then each gradient: one line each, ready for model and reader.

    `facts` tell apart elements that one program loads again from elements that several programs load. `count` says
    what the forward costs at its largest required entry; what it raises becomes a line.
    """
    try:
        counted = count()
    except KernelAgentError as error:
        return (GradientPrice(grad="", line=f"The plan cannot be priced: {error.message}"),)
    return PlanPrice(spec, plan, counted, facts).prices()


class PlanPrice:
    """One plan at one entry on one device."""

    def __init__(self, spec: KernelSpec, plan: Plan, counted: CountedForward, facts: ForwardFacts | None) -> None:
        self.spec, self.plan, self.counted, self.device, self.facts = spec, plan, counted, counted.device, facts
        tensors = [facts for facts in (*counted.inputs, *counted.outputs) if facts.kind is ArgumentKind.TENSOR]
        self.tensors = {facts.name: facts for facts in tensors}
        self.dims = spec.sweep[counted.position].dims
        self.bytes: Mapping[str, int] = {
            **{name: _bytes(facts) for name, facts in self.tensors.items()},
            **{extra.name: self._extra_bytes(extra) for extra in plan.extra},
        }
        self.scratch = {one.name: self._extra_bytes(one) for one in plan.scratch}
        differentiable = {facts.name for facts in spec.outputs if facts.needs_grad}
        self.cotangents = {name: size for name, size in self.bytes.items() if name in differentiable}

    def prices(self) -> tuple[GradientPrice, ...]:
        """The plan as a whole, then each gradient."""
        gradients = [self._gradient(one) for one in self.plan.gradients]
        return (self._whole(gradients), *gradients)

    def _whole(self, gradients: list[GradientPrice]) -> GradientPrice:
        read = {name for one in self.plan.gradients for name in one.saved if name in self.bytes}
        written = [one.grad for one in self.plan.gradients if one.grad in self.tensors]
        extra = sum(p.planned_bytes - (p.floor_bytes or 0) for p in gradients if p.planned_bytes is not None)
        extra += 2 * sum(self.scratch.values())
        floor = sum(self.cotangents.values()) + self._sum(read) + self._sum(written)
        separate = sum(p.planned_bytes or p.floor_bytes or 0 for p in gradients)
        names = ", ".join((*(f"grad_{name}" for name in self.cotangents), *sorted(read)))
        said = [
            f"At the largest required shape on {self.device.name}: one pass over {names} that writes every gradient "
            f"moves {self._cost(floor + extra)}"
        ]
        if len(gradients) > 1:
            said.append(f"a pass for each gradient {self._cost(separate)}")
        said += [
            f"{name} between launches moves {self._cost(2 * moved)} of that, written and read once"
            for name, moved in self.scratch.items()
        ]
        said.append(f"the forward's bound is {duration(self.counted.seconds)}{_arithmetic(self.counted)}")
        again = dict.fromkeys(value for one in self.plan.gradients for value in one.recomputed)
        if again:
            what = ", ".join(f"{value:.40}" for value in again)
            said.append(f"computing {what} again takes at most the forward's {self._work()}, each time")
        said += [self._saving(extra) for extra in self.plan.extra]
        said += list(self.counted.notes)
        return GradientPrice(
            grad="",
            line="; ".join(said) + ".",
            entry=self.counted.label,
            planned_bytes=floor + extra,
            floor_bytes=floor,
            microseconds=self._us(floor + extra),
        )

    def _gradient(self, one: GradientPlan) -> GradientPrice:
        facts = self.tensors.get(one.grad)
        if facts is None:
            return GradientPrice(
                grad=one.grad, line=f"d{one.grad}: no tensor at the largest required shape, not priced."
            )
        floor = sum(self.cotangents.values()) + self._sum(one.saved) + _bytes(facts)
        terms, unknown = self._terms(facts)
        planned = self._planned(one, facts, terms, unknown)
        unsized = self._unsized(one)
        without = f" without reading {', '.join(unsized)}, of unknown size" if unsized else ""
        said = [f"d{one.grad}: floor {self._cost(floor)}{without}"]
        if planned is None:
            said.append(f"planned {one.reduction.value}: not priced, {unknown}")
        else:
            said.append(f"planned {self._option(planned, floor)}")
        others = () if terms is None or self._alone(one.grad, terms) else self._others(one, facts, terms)
        said += [f"instead {self._option(way, floor)}" for way in others if way != planned]
        if planned is None:
            line = "; ".join(said) + "."
            return GradientPrice(grad=one.grad, line=line, entry=self.counted.label, floor_bytes=floor)
        moved = floor + planned.extra_bytes
        return GradientPrice(
            grad=one.grad,
            line="; ".join(said) + ".",
            entry=self.counted.label,
            planned_bytes=moved,
            floor_bytes=floor,
            workspace_bytes=planned.workspace_bytes,
            atomics=planned.atomics,
            microseconds=max(self._us(moved), planned.l2_s * 1e6),
        )

    def _option(self, way: Way, floor: int) -> str:
        words = f", {way.words}" if way.words else ""
        if not way.extra_bytes:
            return f"{way.name}: no more than that{words}"
        return f"{way.name}: {self._cost(floor + way.extra_bytes)}, {_above(way.extra_bytes, floor)}{words}"

    def _terms(self, facts: ArgumentFacts) -> tuple[Terms | None, str]:
        """How often the forward's programs load an input, or why that is not known."""
        name, width = facts.name, _itemsize(facts.dtype)
        reads = [reads for reads in self.counted.reads if reads.name == name]
        if not reads:
            return None, f"no kernel loads `{name}`, or only what torch made of it"
        loads = sum(read.issued_bytes for read in reads) // width
        addresses = max(read.unique_bytes for read in reads) // width
        if addresses > _elements(facts) and loads > addresses:
            return None, f"`{name}` shares its memory with another tensor"
        return Terms(addresses, loads), ""

    def _planned(self, one: GradientPlan, facts: ArgumentFacts, terms: Terms | None, unknown: str) -> Way | None:
        if one.reduction is Reduction.ATOMICS:
            return None if terms is None else self._atomics(facts, terms)
        if one.reduction is Reduction.PARTIALS:
            return None if terms is None else self._partials(facts, terms, persistent=_takes_many(one))
        if one.reduction is Reduction.PLAIN_STORE:
            if terms is None:
                return Way("plain store", 0, f"how many terms its owner collects is not counted: {unknown}")
            if self._alone(one.grad, terms):
                return Way("plain store", 0, f"as one program of the forward loads an element of {one.grad}")
            return Way("plain store", 0, f"its owner collects {terms.each} terms per element")
        return Way(one.reduction.value, 0, "but for rereads that caches do not keep")

    def _alone(self, grad: str, terms: Terms) -> bool:
        """Whether no terms of several programs meet."""
        return terms.loads == terms.addresses or stays_in_one_program(self.facts, grad)

    def _others(self, one: GradientPlan, facts: ArgumentFacts, terms: Terms) -> Iterable[Way]:
        """The ways to bring terms together that the plan does not take."""
        if one.reduction is not Reduction.ATOMICS:
            yield self._atomics(facts, terms)
        if one.reduction is not Reduction.SCAN:
            yield self._partials(facts, terms, persistent=True)

    def _atomics(self, facts: ArgumentFacts, terms: Terms) -> Way:
        extra = _elements(facts) * (2 if _itemsize(facts.dtype) >= SUM_BYTES else 4) * SUM_BYTES
        clock = self.device.clock_mhz * 1e6
        through = 2 * SUM_BYTES * terms.loads / (clock * self.device.multiprocessors * self.device.l2_bytes)
        seconds = max(through, terms.loads / terms.addresses / clock)
        words = f"{amount(terms.loads)} adds to {amount(terms.addresses)} addresses, {terms.each} each"
        words += f", at least {duration(seconds)} in L2"
        return Way("atomics", extra, words, atomics=terms.loads, l2_s=seconds)

    def _partials(self, facts: ArgumentFacts, terms: Terms, *, persistent: bool) -> Way:
        programs = PROGRAMS_PER_SM * self.device.multiprocessors
        sums = min(terms.loads, programs * _elements(facts)) if persistent else terms.loads
        name = f"partials of {programs} programs" if sums < terms.loads else "partials, a sum per load of the forward"
        space = sums * SUM_BYTES
        return Way(name, 2 * space, f"{size(space)} of sums", workspace_bytes=space)

    def _saving(self, extra: ExtraSaved) -> str:
        return (
            f"saving {extra.name} moves {self._cost(2 * self.bytes[extra.name])}, written by the forward and read "
            f"again; computing it again takes at most the forward's {self._work()}"
        )

    def _extra_bytes(self, extra: ExtraSaved) -> int:
        elements = 1
        for one in extra.shape:
            elements *= size_of(one, self.dims)
        return elements * _itemsize(extra.dtype)

    def _unsized(self, one: GradientPlan) -> list[str]:
        """What it reads of `saved` that is neither a known tensor nor a plain value."""
        plain = {facts.name for facts in (*self.counted.inputs, *self.counted.outputs)}
        return [name for name in one.saved if name not in self.bytes and name not in plain]

    def _sum(self, names: Iterable[str]) -> int:
        return sum(self.bytes.get(name, 0) for name in dict.fromkeys(names))

    def _us(self, moved: int) -> float:
        return moved / (self.device.bandwidth_gb_s * 1e9) * 1e6

    def _cost(self, moved: int) -> str:
        return f"{size(moved)} ({duration(self._us(moved) / 1e6)})"

    def _work(self) -> str:
        return f"{duration(self.counted.computing_s)} of arithmetic"


def _takes_many(one: GradientPlan) -> bool:
    """Whether a program of the plan sums over many of the forward's before it stores a partial sum."""
    return "persistent-grid" in one.techniques or _MANY.search(one.owner) is not None


def _arithmetic(forward: CountedForward) -> str:
    """What bounds the forward when it is not memory: then the backward, too, is bound by more than its bytes."""
    named = ", ".join(forward.set_by)
    return f", set by {named}; the backward's arithmetic is not priced, and counts for more than bytes" if named else ""


def _above(extra: int, floor: int) -> str:
    """How far bytes beyond the floor lift a gradient above it, in words."""
    ratio = extra / floor if floor else 0.0
    if ratio >= 2:
        return f"{1 + ratio:.3g} times the floor"
    return f"{100 * ratio:.2g} % above" if ratio < 0.1 else f"{100 * ratio:.0f} % above"


def _bytes(facts: ArgumentFacts) -> int:
    return _elements(facts) * _itemsize(facts.dtype)


def _elements(facts: ArgumentFacts) -> int:
    count = 1
    for length in facts.shape:
        count *= length
    return count


def _itemsize(dtype: str) -> int:
    """Bytes of an element, by the bits in the dtype's name."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(1, int(bits.group()) // 8)
