"""`tune`: a bounded sweep over the numbers of a green backward, before a model is asked to make it faster.

One coordinate after the other, from the present value up and down by powers of two, as long as it gets faster. What
the compiler already rules out is not timed. What is fastest then goes through the whole gate; where it is red, the step
before it does, so what comes out is proven, and a sweep costs one check in most cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernel_agent.bench.records import Basis, Measurement, Tuned, decide
from kernel_agent.bench.tunable import TunableKind
from kernel_agent.bench.variants import Space
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.spec import Candidate, KernelSpec

STEP_GAIN = 0.005
"""Relative time that a step must save."""


@dataclass(frozen=True)
class Tried:
    """One variant that was looked at."""

    number: int
    """Counts from 1."""
    limit: int
    change: str
    """`BLOCK_M 64 -> 128`."""
    microseconds: float | None
    """Geometric mean; None where it was not timed."""
    line: str
    """What came of it, in words."""


@dataclass(frozen=True)
class TunedCandidate:
    """What a sweep found."""

    candidate: Candidate | None
    """None when nothing is faster than the start."""
    tuned: Tuned
    verdict: Verdict | None = None
    """The green one of the candidate."""


Check = Callable[[Candidate], Verdict]
Measure = Callable[[Candidate], Measurement]
Screen = Callable[[Candidate], str]
"""Why a variant need not be timed; empty where nothing speaks against it."""
OnVariant = Callable[[Tried], None]


def tune(
    spec: KernelSpec,
    candidate: Candidate,
    check: Check,
    measure: Measure,
    limit: int,
    on_variant: OnVariant | None = None,
    *,
    start: Measurement | None = None,
    screen: Screen | None = None,
    min_rel_impr: float = 0.0,
) -> TunedCandidate:
    """Try at most `limit` variants of a green candidate and return the fastest that is green, if it is to be kept.

    `start` is the candidate's own measurement, where there is one. `screen` sorts variants out before they are timed
    (`kernel_agent.bench.modelled.screen`). A variant that cannot be timed is left out. Raises what `measure` raises for
    the candidate itself.
    """
    start = measure(candidate) if start is None else start
    sweep = _Sweep(Space.of(candidate, inside_kernels=True), start, measure, screen, limit, on_variant)
    sweep.run()
    verdict = sweep.prove(check)
    if verdict is None:
        return TunedCandidate(None, _nothing(spec, sweep))
    decision = decide(start, sweep.measurement, min_rel_impr)
    if not decision.kept:
        line = f"{sweep.said}: {decision.line}{_basis(start)}"
        return TunedCandidate(None, Tuned(tried=sweep.tried, best=None, line=line))
    found = sweep.space.variant(sweep.best)
    line = f"{sweep.said}: {decision.line}{_basis(start)}, after {sweep.tried} variants"
    tuned = Tuned(tried=sweep.tried, best=found.digest, line=line, measurement=sweep.measurement)
    return TunedCandidate(found, tuned, verdict)


@dataclass(frozen=True)
class _Step:
    """A variant that was faster than the step before it."""

    values: dict[int, int]
    """Values that differ from the start's, by place."""
    measurement: Measurement


class _Sweep:
    """Where a sweep stands."""

    def __init__(
        self,
        space: Space,
        start: Measurement,
        measure: Measure,
        screen: Screen | None,
        limit: int,
        on_variant: OnVariant | None,
    ) -> None:
        self.space = space
        self.steps = [_Step({}, start)]
        """From the start to the fastest so far."""
        self.tried = 0
        self.measure, self.screen = measure, screen
        self.limit, self.on_variant = limit, on_variant
        self._known: set[str] = {space.candidate.digest}

    @property
    def best(self) -> dict[int, int]:
        """Values of the fastest that differ from the start's."""
        return self.steps[-1].values

    @property
    def measurement(self) -> Measurement:
        """Of the fastest."""
        return self.steps[-1].measurement

    @property
    def said(self) -> str:
        """What the best variant changes."""
        return self.space.said(self.best)

    def run(self) -> None:
        """Go over all coordinates until a round brings nothing or the limit is reached."""
        moved = True
        while moved and self.tried < self.limit:
            moved = False
            for place in range(len(self.space.tunables)):
                moved = self._along(place) or moved

    def prove(self, check: Check) -> Verdict | None:
        """The verdict of the fastest variant that is green; steps that are red are dropped. None: the start is left."""
        while len(self.steps) > 1:
            verdict = check(self.space.variant(self.best))
            if verdict.green:
                return verdict
            self._told(self.best, self.measurement.geomean_us, f"faster but wrong: {verdict.status.value}")
            self.steps.pop()
        return None

    def _along(self, place: int) -> bool:
        """Walk along one coordinate; whether that was worth it."""
        tunable = self.space.tunables[place]
        if tunable.kind is TunableKind.CONFIG:  # they have no order
            return sum(self._step(place, value) for value in tunable.values) > 0
        for step in (1, -1):
            moved = False
            while (value := tunable.beside(self.best.get(place, tunable.value), step)) is not None:
                if not self._step(place, value):
                    break
                moved = True
            if moved:
                return True
        return False

    def _step(self, place: int, value: int) -> bool:
        """Change one value of the best; whether that is the best now."""
        tunables = self.space.tunables
        return self._better({k: v for k, v in {**self.best, place: value}.items() if tunables[k].value != v})

    def _better(self, values: dict[int, int]) -> bool:
        """Time a variant; whether it is faster than the fastest."""
        variant = self.space.variant(values)
        if variant.digest in self._known or self.tried >= self.limit:
            return False
        self._known.add(variant.digest)
        self.tried += 1
        why = self.screen(variant) if self.screen is not None else ""
        if why:
            return self._told(values, None, f"not timed: {why}")
        try:
            measured = self.measure(variant)
            decision = decide(self.measurement, measured, STEP_GAIN)
        except (KernelAgentError, ValueError) as error:
            return self._told(values, None, f"cannot be timed: {str(error).splitlines()[0]}")
        if not decision.kept:
            return self._told(values, measured.geomean_us, f"not faster: {decision.line}")
        self.steps.append(_Step(values, measured))
        self._told(values, measured.geomean_us, f"faster: {decision.line}")
        return True

    def _told(self, values: dict[int, int], microseconds: float | None, line: str) -> bool:
        if self.on_variant is not None:
            self.on_variant(Tried(self.tried, self.limit, self.space.said(values), microseconds, line))
        return False


def _nothing(spec: KernelSpec, sweep: _Sweep) -> Tuned:
    if not sweep.space.tunables:
        line = f"the backward of {spec.facts.stub} has no block size, warps or stages to tune"
    else:
        line = f"none of {sweep.tried} variants is green and faster{_basis(sweep.measurement)}"
    return Tuned(tried=sweep.tried, best=None, line=line)


def _basis(measurement: Measurement) -> str:
    return f" ({Basis.MODELLED.value})" if measurement.basis is Basis.MODELLED else ""
