"""`shear_of`: the trip of a loop by what a mask says of it and of other indices: cells of a diagonal, by their columns.

A walk over the diagonals of a table has `j = step - i` in its trip `step`, and a mask keeps `j` from 0 to the columns.
Neither the trip nor the row `i` tells where a row ends; with `j` for `step`, which the two give as well as `j` and `i`
give `step`, the address is that of a table, and as many cells are reached as the table has if no trip is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernel_agent.compiler.schedule.claims import Claim
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Bound, Site, below, mask_forms, negatives
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.value import Value

if TYPE_CHECKING:
    from kernel_agent.compiler.schedule.coverage import Counter


@dataclass(frozen=True)
class Shear:
    """A trip as another index."""

    trip: Atom
    index: Atom
    """At least 0, and less than its extent, wherever the operation takes part."""
    place: Form
    """The trip, in terms of the index and of others."""
    sides: tuple[Form, Form]
    """What says so: less than 0 both."""
    bounds: tuple[Bound, ...]
    """What holds besides, in the same terms."""

    def form(self, form: Form) -> Form:
        """The same in terms of the index."""
        return _at(form, self.trip, self.place)

    def told(self, atoms: frozenset[Atom]) -> frozenset[Atom]:
        """What tells these apart."""
        return atoms - {self.trip} | {self.index} if self.trip in atoms else atoms


def shear_of(forms: Forms, site: Site) -> Shear | None:
    """None where no mask keeps a trip in step with other indices."""
    if site.op.mask is None or not site.loops:
        return None
    trips = [forms.trip(loop) for loop in site.loops if loop.code is Code.FOR]
    parts = negatives(forms, site)
    for low in parts:
        for high in parts:
            within = Form(low.times(Polynomial.integer(-1)).terms)
            if not within.terms or Form(high.terms) != within or within.rises or not _is_plain(within):
                continue
            for trip in trips:
                found = _shear(trip, within, low, high, parts)
                if found is not None:
                    return found
    return None


def _is_plain(form: Form) -> bool:
    """Whether a form is of programs, trips and lanes alone."""
    return all(atom.kind in (Kind.PROGRAM, Kind.TRIP, Kind.LANE) for atom, _ in form.terms)


def _shear(trip: Atom, within: Form, low: Form, high: Form, parts: Sequence[Form]) -> Shear | None:
    """`within` less what `low` says is at least 0, and `high` that it is less than a number."""
    sign = within.coefficients.get(trip)
    if sign not in (ONE, Polynomial.integer(-1)) or sign is None:
        return None
    whole = within - Form(base=low.base + ONE)
    index = Atom(Kind.WITHIN, 0, whole, extent=(whole - high).base)
    place = (Form.of({index: ONE}) - (whole - Form.of({trip: sign}))).times(sign)
    moved = [_at(part, trip, place) for part in parts]
    return Shear(trip, index, place, (low, high), tuple(bound for part in moved for bound in below(part)))


def _at(form: Form, atom: Atom, place: Form) -> Form:
    """A form with another one for an atom."""
    factor = form.coefficients.get(atom)
    return form if factor is None else form - Form.of({atom: factor}) + place.times(factor)


def counted_in_step(counter: Counter, site: Site) -> Polynomial | None:
    """How many take part of which a mask keeps a trip in step with other indices; None where that is not known, or
    where the loop may not have all trips that it takes."""
    forms, shear = counter.forms, shear_of(counter.forms, site)
    if shear is None or site.op.mask is None or shear.trip.extent is None or shear.index.extent is None:
        return None
    left = [part for part in conjuncts(site.op.mask) if not set(mask_forms(forms, part)) <= set(shear.sides)]
    ends = _ends(forms, shear, left)
    if ends is None:
        return None
    least, most = ends
    counter.claims += [Claim(least, Polynomial()), Claim(shear.trip.extent, most + ONE)]
    others = replace(counter, apart=counter.apart | {shear.trip}).count_where(site, left)
    counter.axes.append((Form.of({shear.index: ONE}), shear.index.extent))
    return None if others is None else others * shear.index.extent


def _ends(forms: Forms, shear: Shear, masks: Sequence[Value]) -> tuple[Polynomial, Polynomial] | None:
    """The first and the last trip that are taken; None where it is not known how far other indices go."""
    known = [bound for mask in masks for part in mask_forms(forms, mask) if part is not None for bound in below(part)]
    ends = {
        bound.form.terms[0][0]: bound.below
        for bound in reversed(known)
        if bound.form.terms[0][1] == ONE and bound.size == 1
    }
    least = most = shear.place.base
    for atom, number in shear.place.terms:
        end = ends.get(atom, atom.extent)
        if end is None or not (number.surely(0) or (-number).surely(0)):
            return None
        reach = number * (end - ONE)
        least, most = (least, most + reach) if number.surely(0) else (least + reach, most)
    return least, most
