"""`Floors`: indices that conditions keep from being small, counted from the least that takes part.

Where programs below a number work on queries and those from it on on keys, the latter know their heads by how far they
are above it: `(pid - n) * BLOCK + lane`. Counted from n, such an index is at least 0 like any other, and what a mask
says of heads is less than the number of heads, not than that and n tiles more. Addresses that differ for one way to
count differ for the other. So it is with sums: columns of what was joined from several tensors, from where the second
begins to where it ends, are as many as that has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.sites import Bound, Site, negatives, risen


@dataclass(frozen=True)
class Floors:
    """Where some indices begin."""

    least: dict[Atom, Polynomial] = field(default_factory=dict)
    """Of each program's number what it is no less than."""
    sums: dict[Form, Polynomial] = field(default_factory=dict)
    """The same of other indices, and of sums of them."""

    @classmethod
    def of(cls, forms: Forms, written: Sequence[Site]) -> Floors:
        """What holds at all of some operations."""
        found = [_lows(negatives(forms, site)) for site in written]
        return cls.parted({form: low for form, low in found[0].items() if all(one.get(form) == low for one in found)})

    @classmethod
    def parted(cls, lows: Mapping[Form, Polynomial]) -> Floors:
        """From what each index or sum is no less than."""
        found = cls()
        for form, low in lows.items():
            (atom, number), *more = form.terms
            if atom.kind is Kind.PROGRAM and number == ONE and not more:
                found.least[atom] = low
            else:
                found.sums[form] = low
        return found

    def form(self, form: Form) -> Form:
        """The same number, of programs that are counted from there."""
        terms = {self.atom(atom): number for atom, number in form.terms}
        return Form.of(terms, form.base + self.beneath(form))

    def bound(self, bound: Bound) -> Bound:
        """The same of what is less than something."""
        terms = Form.of(dict(self.form(bound.form).terms))
        return replace(bound, form=terms, below=bound.below - self.beneath(bound.form))

    def width(self, bound: Bound) -> Bound:
        """How many values a sum has, for how far it goes."""
        return replace(bound, below=bound.below - self.sums.get(bound.form, ZERO))

    def atom(self, atom: Atom) -> Atom:
        """An index, counted from there."""
        low, extent = self.least.get(atom), atom.extent
        return atom if low is None or extent is None else replace(atom, extent=extent - low)

    def beneath(self, form: Form) -> Polynomial:
        """What the least of its programs add up to."""
        found = ZERO
        for atom, number in form.terms:
            found = found + number * self.least.get(atom, ZERO)
        return found

    def suit(self, forms: Iterable[Form]) -> bool:
        """Whether some forms have the indices as they are, and no quotient or remainder of one, nor have sums."""
        summed = {atom for form in self.sums for atom, _ in form.terms}
        derived = [atom for form in forms for atom, _ in form.terms if atom.whole is not None or atom.reads]
        known = self.least.keys() | summed
        return not self.least.keys() & summed and not any(known & atom.sources for atom in derived)


def begun(forms: Forms, written: Sequence[Site]) -> Forms | None:
    """Forms that count programs from where they begin at all of some operations, also in quotients and remainders of
    what is made of their numbers; None where they begin with the first."""
    begins = {atom.number: low for atom, low in Floors.of(forms, written).least.items()} if written else {}
    return Forms(forms.kernel, forms.launch, begins) if begins else None


def _lows(known: Iterable[Form]) -> dict[Form, Polynomial]:
    found: dict[Form, Polynomial] = {}
    for negative in known:
        low = risen(negative)
        if low is not None:
            found.setdefault(*low)
    return found
