"""`Limits`: what the masks of an operation, and conditions around it, say of its indices.

Whoever counts what is stored must know all that a mask says: a part that is not understood could leave out any element.
What is understood is that sums of indices are less than something, and that some are no less than something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kernel_agent.compiler.schedule.claims import Claim, Rising, open_claims
from kernel_agent.compiler.schedule.floors import Floors
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.once import Once, once
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.segments import Segment
from kernel_agent.compiler.schedule.sites import Bound, Site, whole_bounds
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value

MOST = 64
"""Conditions of which any is enough that are tried."""


def alternatives(mask: Value | None) -> list[tuple[Value | Once, ...]]:
    """A mask, then what is enough for it: masks of which all must hold."""
    if mask is None:
        return [()]
    found: list[tuple[Value | Once, ...]] = [(mask,), *((one,) for one in once(mask))]
    op = mask.producer
    if op is not None and op.code in (Code.OR, Code.AND):
        left, right = (alternatives(side) for side in op.operands)
        if op.code is Code.OR:
            found += [*left, *right]
        elif max(len(left), len(right)) > 1:
            found += [one + other for one in left for other in right]
    return found[:MOST]


@dataclass
class Limits:
    """Bounds of sums of indices, of which nothing is left out but what holds all over segments."""

    bounds: list[Bound] = field(default_factory=list)
    """Of several of one index the shortest, taken for the least, which is noted."""
    floors: Floors = field(default_factory=Floors)
    """Where indices begin that conditions keep from being small."""
    claims: list[Claim | Rising] = field(default_factory=list)
    """For all that."""

    @classmethod
    def of(cls, forms: Forms, site: Site, masks: Sequence[Value | Once]) -> Limits | None:
        """What conditions around an operation and masks say; None where one is not understood, or keeps an index from
        being small."""
        return cls()._read(forms, site, masks, None, None)

    @classmethod
    def floored(
        cls,
        forms: Forms,
        site: Site,
        masks: Sequence[Value | Once],
        within: Segment | None = None,
        apart: frozenset[Atom] = frozenset(),
    ) -> Limits | None:
        """The same, and what indices are no less than. `within`: the segments that places are in. `apart`: indices that
        are not counted."""
        lows: dict[Form, Polynomial] = {}
        limits = cls()._read(forms, site, masks, within, lows)
        if limits is None:
            return None
        limits.floors = Floors.parted(lows)
        if not limits.suited(forms, site, within, apart):
            return None
        limits.bounds = [limits.floors.bound(bound) for bound in limits.bounds]
        return limits

    def _read(
        self,
        forms: Forms,
        site: Site,
        masks: Sequence[Value | Once],
        within: Segment | None,
        lows: dict[Form, Polynomial] | None,
    ) -> Limits | None:
        where = within.negative if within is not None else None
        conditions: list[tuple[Value | Once, bool]] = [*site.conditions, *((mask, True) for mask in masks)]
        found: dict[Form, dict[Polynomial, None]] = {}
        for condition, holds in conditions:
            if isinstance(condition, Once):
                inner = self._once(forms, condition)
            else:
                steps: list[Polynomial] = []
                inner = whole_bounds(forms, condition, holds=holds, steps=steps, where=where, lows=lows)
                self.claims += [Claim(step, ZERO) for step in steps]
            if inner is None:
                return None
            for bound in inner:
                found.setdefault(bound.form, {})[bound.below] = None
        for form, ends in found.items():
            least, *others = sorted(ends, key=lambda end: (len(end.terms), len(end.text()), end.text()))
            self.claims += [Claim(other, least) for other in others]
            self.bounds.append(Bound(form, least))
        return self

    def _once(self, forms: Forms, mask: Once) -> list[Bound] | None:
        """What a mask says in the first of some trips that shows all of it; None where none does."""
        for trips, claims in mask.trips(forms):
            inner = whole_bounds(forms, mask.mask, trips=trips)
            if inner is not None and open_claims(claims) is not None:
                self.claims += claims
                return inner
        return None

    def suited(self, forms: Forms, site: Site, within: Segment | None, apart: frozenset[Atom]) -> bool:
        """Whether it is known how many values indices have that begin somewhere. A sum has all from there to its bound
        if it had all from 0; a program's number is one that no loop starts or ends with."""
        low = self.floors
        counted = not low.least or not (site.loops or low.least.keys() & apart)
        bounded = low.sums.keys() <= {bound.form for bound in self.bounds}
        simple = low.suit((forms.of(site.op.offset), *(bound.form for bound in self.bounds)))
        return not (low.least or low.sums) or (within is None and counted and bounded and simple)

    def cut_off(self, rest: dict[Atom, Polynomial | None]) -> None:
        """Leave out of indices what lies beneath where they begin."""
        for atom, low in self.floors.least.items():
            extent = rest.get(atom)
            if extent is not None:
                self.claims += [Claim(low, ZERO), Claim(extent, low)]
                rest[atom] = extent - low

    def within_others(self, rest: dict[Atom, Polynomial | None]) -> list[Bound]:
        """The bounds without those of single indices that others bound as parts of sums: they say how many values the
        index has, where it has no fewer, which is noted."""
        kept = []
        for bound in self.bounds:
            atom, number = bound.form.terms[0]
            extent = rest.get(atom)
            inner = any(other.size > 1 and atom in other.form.coefficients for other in self.bounds)
            if bound.size > 1 or number != ONE or extent is None or not inner or atom.kind is not Kind.PROGRAM:
                kept.append(bound)
                continue
            self.claims.append(Claim(extent, bound.below))
            rest[atom] = bound.below
        return kept
