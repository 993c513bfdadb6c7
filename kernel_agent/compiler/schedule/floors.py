"""`Floors`: programs that conditions keep from having small numbers, counted from the least that takes part.

Where programs below a number work on queries and those from it on on keys, the latter know their heads by how far they
are above it: `(pid - n) * BLOCK + lane`. Counted from n, such an index is at least 0 like any other, and what a mask
says of heads is less than the number of heads, not than that and n tiles more. Addresses that differ for one way to
count differ for the other.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.sites import Bound, Site, mask_forms, negatives
from kernel_agent.compiler.ssa.value import Value


@dataclass(frozen=True)
class Floors:
    """Where some indices begin."""

    least: dict[Atom, Polynomial] = field(default_factory=dict)
    """Of each what it is no less than."""

    @classmethod
    def of(cls, forms: Forms, written: Sequence[Site]) -> Floors:
        """What holds at all of some operations."""
        found = [_floors(negatives(forms, site)) for site in written]
        return cls({atom: low for atom, low in found[0].items() if all(one.get(atom) == low for one in found)})

    def told(self, forms: Forms, condition: Value, apart: Container[Atom], *, holds: bool) -> bool:
        """Whether a condition says where an index begins, and nothing else, of one that has no other begin and is not
        `apart`; that is noted then."""
        parts = mask_forms(forms, condition, holds=holds)
        low = floor_of(parts[0]) if len(parts) == 1 else None
        if low is None or low[0] in self.least or low[0] in apart:
            return False
        self.least[low[0]] = low[1]
        return True

    def form(self, form: Form) -> Form:
        """The same number, of indices that are counted from there."""
        terms = {self.atom(atom): number for atom, number in form.terms}
        return Form.of(terms, form.base + self.beneath(form))

    def bound(self, bound: Bound) -> Bound:
        """The same of what is less than something."""
        return replace(
            bound, form=Form.of(dict(self.form(bound.form).terms)), below=bound.below - self.beneath(bound.form)
        )

    def atom(self, atom: Atom) -> Atom:
        """An index, counted from there."""
        low, extent = self.least.get(atom), atom.extent
        return atom if low is None or extent is None else replace(atom, extent=extent - low)

    def beneath(self, form: Form) -> Polynomial:
        """What the least of its indices add up to."""
        found = ZERO
        for atom, number in form.terms:
            found = found + number * self.least.get(atom, ZERO)
        return found

    def suit(self, forms: Iterable[Form]) -> bool:
        """Whether some forms have the indices as they are, and no quotient or remainder of one."""
        derived = [atom for form in forms for atom, _ in form.terms if atom.whole is not None or atom.reads]
        return not any(self.least.keys() & atom.sources for atom in derived)


def floor_of(negative: Form | None) -> tuple[Atom, Polynomial] | None:
    """The program's number that is no less than a number of the launch where a form is less than 0, and that; None
    where the form says anything else."""
    if negative is None or len(negative.terms) != 1:
        return None
    ((atom, number),) = negative.terms
    return (atom, negative.base + ONE) if atom.kind is Kind.PROGRAM and number == -ONE else None


def _floors(known: Iterable[Form]) -> dict[Atom, Polynomial]:
    found: dict[Atom, Polynomial] = {}
    for negative in known:
        floor = floor_of(negative)
        if floor is not None:
            found.setdefault(*floor)
    return found
