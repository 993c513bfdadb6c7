"""`Search`: a bounded search over what a derived backward chooses, kernel by kernel and in batches.

Kernels of one backward do not share their numbers, so that one variant tries another value of each at a time, and each
is chosen by its own times. The first batch lies around the values as they are, those after it around the best so far.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernel_agent.bench.tunable import Tunable, TunableKind
from kernel_agent.bench.variants import Space
from kernel_agent.compiler.tuning.trial import Judge, Trial

Values = frozenset[tuple[int, int]]
"""Places of tunables with their values; what is absent is as it was."""

FIRST, LATER = 24, 12
"""Variants of a batch."""
NEAR = 3.0
"""Distance from the values as they are within which the first batch lies."""
_STEPS = {
    TunableKind.BLOCK: 0.5,
    TunableKind.WARPS: 0.0,
    TunableKind.STAGES: 0.4,
    TunableKind.PROGRAMS: 0.8,
    TunableKind.SWITCH: 0.8,
}
"""What one step along a ladder counts as."""
WORK_STEP = 0.7
"""What twice or half the elements of a tile per warp count as: a smaller tile goes with fewer warps."""
LARGER = 1.3
"""Times this, where they are more: a backward holds more than the forward whose numbers it starts with."""
_LONE = 0.7
"""What one step of a number of warps counts as in place of a formula, which tells nothing of tiles."""
_FORMULAS = {
    TunableKind.WARPS: (8, 16, 4, 32),
    TunableKind.STAGES: (2, 3, 1, 4),
    TunableKind.PROGRAMS: (1, 2, 4, 8),
    TunableKind.SWITCH: (1, 0),
}
"""Values in place of a formula, the likeliest first."""


@dataclass
class Part:
    """Kernels that share numbers, and what was tried of these."""

    places: tuple[int, ...]
    """Of their tunables."""
    kernels: frozenset[str]
    tried: dict[Values, dict[str, float]] = field(default_factory=dict)
    """Values -> microseconds by label of the entry; only what fits, and spills no more than the start."""
    asked: set[Values] = field(default_factory=set)

    @property
    def labels(self) -> list[str]:
        """Entries at which the kernels are launched."""
        return list(self.tried.get(frozenset(), {}))

    def mean(self, values: Values, labels: Sequence[str]) -> float:
        """Geometric mean of the times at some entries; infinite where one is missing."""
        times = self.tried.get(values, {})
        if not labels or any(label not in times for label in labels):
            return math.inf
        return math.exp(sum(math.log(max(times[label], 1e-3)) for label in labels) / len(labels))

    def best(self, labels: Sequence[str]) -> Values:
        """The fastest values at some entries; the start where nothing is faster."""
        return min(self.tried, key=lambda values: (self.mean(values, labels), len(values)), default=frozenset())


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    parts: tuple[Part, ...]
    sizes: Mapping[str, Mapping[str, int]]
    tried: int
    problems: tuple[str, ...]
    """Why variants have no times, each once."""


def parts_of(space: Space, dropped: frozenset[int] = frozenset()) -> tuple[Part, ...]:
    """Tunables by the kernels that take them. `dropped`: places that stay as they are."""
    groups: list[tuple[set[int], set[str]]] = []
    for place, tunable in enumerate(space.tunables):
        if not tunable.kernels or tunable.kind not in _STEPS or place in dropped:
            continue
        joined = [group for group in groups if group[1] & set(tunable.kernels)]
        places, kernels = {place}, set(tunable.kernels)
        for group in joined:
            places |= group[0]
            kernels |= group[1]
            groups.remove(group)
        groups.append((places, kernels))
    return tuple(Part(tuple(sorted(places)), frozenset(kernels)) for places, kernels in groups)


def search(
    space: Space,
    judge: Judge,
    *,
    seconds: float,
    rounds: int = 4,
    dropped: frozenset[int] = frozenset(),
    first: int = FIRST,
) -> Found:
    """Try batches of variants until one brings nothing, or less than half a batch's time is left. The start is among
    the first."""
    parts = parts_of(space, dropped)
    until, took = time.monotonic() + seconds, 0.0
    sizes: Mapping[str, Mapping[str, int]] = {}
    count, problems, spills = 0, dict[str, None](), dict[frozenset[str], int]()
    for number in range(rounds):
        wanted = [list(_first(space, part, first)) if number == 0 else _later(space, part) for part in parts]
        batch: list[Values] = [frozenset()] if number == 0 else []
        batch += [frozenset().union(*some) for some in itertools.zip_longest(*wanted, fillvalue=frozenset())]
        began = time.monotonic()
        if not batch or began + took / 2 > until:
            break
        tried = judge([space.variant(dict(values)) for values in batch])
        took = time.monotonic() - began
        count += len(batch)
        sizes = {**sizes, **tried.sizes}
        before = [part.mean(part.best(part.labels), part.labels) for part in parts]
        for values, trial in zip(batch, tried.trials, strict=True):
            if trial.problem:
                problems[trial.problem.splitlines()[0]] = None
            for part in parts:
                _note(part, values, trial, spills, single=len(parts) == 1)
        after = [part.mean(part.best(part.labels), part.labels) for part in parts]
        if number and all(new > 0.99 * old for new, old in zip(after, before, strict=True)):
            break
    return Found(parts, sizes, count, tuple(problems))


def _note(
    part: Part,
    values: Values,
    trial: Trial,
    spills: dict[frozenset[str], int],
    *,
    single: bool,
) -> None:
    """Keep the times of one part of a variant."""
    own = frozenset((place, value) for place, value in values if place in part.places)
    times = {}
    for label, seen in trial.entries.items():
        mine = [kernel for kernel in seen if kernel.name in part.kernels]
        if mine:
            times[label] = trial.totals[label] if single else sum(kernel.microseconds for kernel in mine)
    spilled = trial.spills(part.kernels)
    if not own and part.kernels not in spills:
        spills[part.kernels] = spilled
    if own and spilled > spills.get(part.kernels, 0):
        return
    if times and (own not in part.tried or sum(times.values()) < sum(part.tried[own].values())):
        part.tried[own] = times


def _first(space: Space, part: Part, limit: int) -> Iterator[Values]:
    """Values around the start, the nearest first."""
    tunables = [space.tunables[place] for place in part.places]
    found = []
    for some in itertools.product(*((tunable.value, *tunable.values) for tunable in tunables)):
        items = {
            (place, value) for place, value, t in zip(part.places, some, tunables, strict=True) if value != t.value
        }
        distance = _distance(tunables, some)
        if items and distance <= NEAR:
            found.append((distance, sorted(items)))
    ordered = dict.fromkeys(frozenset(items) for _, items in sorted(found))
    for values in list(ordered)[:limit]:
        part.asked.add(values)
        yield values


def _distance(tunables: Sequence[Tunable], values: Sequence[int]) -> float:
    """How far values are from the present ones."""
    total, per_warp = 0.0, 0.0
    for tunable, value in zip(tunables, values, strict=True):
        if value == tunable.value:
            continue
        if tunable.value not in tunable.values:  # in place of a formula
            step = _STEPS[tunable.kind] or _LONE
            total += step * (1 + _FORMULAS[tunable.kind].index(value))
            continue
        steps = tunable.values.index(value) - tunable.values.index(tunable.value)
        total += abs(steps) * _STEPS[tunable.kind]
        per_warp += steps * {TunableKind.BLOCK: 1, TunableKind.WARPS: -1}.get(tunable.kind, 0)
    return total + WORK_STEP * abs(per_warp) * (LARGER if per_warp > 0 else 1.0)


def _later(space: Space, part: Part) -> list[Values]:
    """Values one step from the best, at all entries together and at each."""
    centres = dict.fromkeys([part.best(part.labels), *(part.best([label]) for label in part.labels)])
    found: dict[Values, None] = {}
    for centre in centres:
        values = dict(centre)
        for place in part.places:
            tunable = space.tunables[place]
            now = values.get(place, tunable.value)
            for step in (1, -1):
                other = tunable.beside(now, step)
                if other is not None:
                    changed = {**values, place: other}
                    kept = {p: v for p, v in changed.items() if space.tunables[p].value != v}
                    found[frozenset(kept.items())] = None
    fresh = [values for values in found if values and values not in part.asked][:LATER]
    part.asked |= set(fresh)
    return fresh
