"""`Form`: an integer as a linear form of indices: which program, which trip of a loop, which lane of the tile.

Whether two lanes can write one address is a question about such forms, and so is whether all elements are written.
Integers are taken not to wrap, as the forward takes them itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial, ceiling


class Kind(enum.IntEnum):
    """What an atom counts."""

    PROGRAM = 0
    """Programs along an axis of the grid."""
    TRIP = 1
    """Trips of a loop, from 0 whatever its bounds are."""
    LANE = 2
    """Lanes along an axis of the tile that the form is of, from 0 whatever the arange starts with."""
    QUOTIENT = 3
    """`whole // divisor`, neither negative."""
    REMAINDER = 4
    """`whole % divisor`, neither negative."""
    COPY = 5
    """Several accesses whose addresses differ by a fixed distance, as if a loop had been unrolled."""
    PLACE = 6
    """A place in a segment: `whole` is where the segment begins, which is opaque, and how far from there it is."""
    OPAQUE = 7
    """Anything else that is not the same for all programs, trips and lanes."""
    WITHIN = 8
    """`whole`, which a mask keeps from being negative."""


@dataclass(frozen=True)
class Atom:
    """An index, at least 0 unless it is opaque."""

    kind: Kind
    number: int
    """Axis of the grid or of the tile; id of the loop's index; id of the opaque value; 0 of the others."""
    whole: Form | None = None
    """Of quotients, remainders, places and sums within bounds."""
    divisor: Polynomial | None = None
    """Of quotients and remainders."""
    reads: frozenset[Atom] = frozenset()
    """What an opaque one depends on."""
    extent: Polynomial | None = field(default=None, compare=False)
    """It is less than this; None where that is not known."""

    @property
    def key(self) -> tuple[object, ...]:
        """To sort by, the same in every process."""
        divisor = self.divisor.text() if self.divisor else ""
        return (int(self.kind), self.number, divisor, self.whole.key if self.whole else ())

    @property
    def sources(self) -> frozenset[Atom]:
        """The programs, trips and lanes that it depends on; opaque values stay among them where they do not say."""
        if self.kind is Kind.OPAQUE:
            return self.reads or frozenset((self,))
        if self.whole is not None:
            return self.whole.sources
        return frozenset((self,))


@dataclass(frozen=True)
class Form:
    """base + the sum of coefficient * atom."""

    terms: tuple[tuple[Atom, Polynomial], ...] = ()
    """Sorted, without zeros: equal forms are equal records."""
    base: Polynomial = ZERO

    @classmethod
    def of(cls, terms: Mapping[Atom, Polynomial], base: Polynomial = ZERO) -> Form:
        """From coefficients by atom."""
        kept = [(atom, coefficient) for atom, coefficient in terms.items() if coefficient.terms]
        return cls(tuple(sorted(kept, key=lambda term: term[0].key)), base)

    @property
    def coefficients(self) -> dict[Atom, Polynomial]:
        """By atom."""
        return dict(self.terms)

    @property
    def key(self) -> tuple[object, ...]:
        """To sort by, the same in every process."""
        return (tuple((atom.key, coefficient.text()) for atom, coefficient in self.terms), self.base.text())

    @property
    def invariant(self) -> Polynomial | None:
        """The number that it is for all programs, trips and lanes, or None."""
        return None if self.terms else self.base

    @property
    def sources(self) -> frozenset[Atom]:
        """The programs, trips and lanes that it depends on."""
        return frozenset(source for atom, _ in self.terms for source in atom.sources)

    @property
    def not_negative(self) -> bool:
        """Proved."""
        return self.base.surely(0) and self.rises

    @property
    def rises(self) -> bool:
        """No atom can make it smaller, and all atoms are known to be at least 0."""
        return all(atom.kind is not Kind.OPAQUE and number.surely(0) for atom, number in self.terms)

    def __add__(self, other: Form) -> Form:
        found = self.coefficients
        for atom, coefficient in other.terms:
            found[atom] = found.get(atom, ZERO) + coefficient
        return Form.of(found, self.base + other.base)

    def times(self, factor: Polynomial) -> Form:
        """Scaled."""
        return Form.of({atom: number * factor for atom, number in self.terms}, self.base * factor)

    def __sub__(self, other: Form) -> Form:
        return self + other.times(Polynomial.integer(-1))

    def over(self, divisor: Polynomial) -> Form | None:
        """Divided exactly, every coefficient and the base; None where one leaves a rest."""
        base = self.base.quotient(divisor)
        numbers = [(atom, number.quotient(divisor)) for atom, number in self.terms]
        if base is None:
            return None
        kept: dict[Atom, Polynomial] = {}
        for atom, number in numbers:
            if number is None:
                return None
            kept[atom] = number
        return Form.of(kept, base)

    def at(self, places: Mapping[Atom, Polynomial]) -> Form:
        """The same form where some atoms are numbers, but for what quotients and the like are of."""
        left = {atom: number for atom, number in self.terms if atom not in places}
        base = self.base
        for atom, number in self.terms:
            base = base + number * places[atom] if atom in places else base
        return Form.of(left, base)

    def moved(self, axis_of: Callable[[int], int]) -> Form:
        """The same form of a tile whose axes are permuted, or more, by old axis -> new axis."""
        terms: dict[Atom, Polynomial] = {}
        for atom, number in self.terms:
            moved = moved_atom(atom, axis_of)
            terms[moved] = terms.get(moved, ZERO) + number
        return Form.of(terms, self.base)


def quotient_of(whole: Form, divisor: Polynomial) -> Atom:
    """`whole // divisor`, neither negative; (n // a) // b is n // (a b), and n % (a b) // a is n // a % b."""
    if len(whole.terms) == 1 and not whole.base.terms and whole.terms[0][1] == ONE:
        inner = whole.terms[0][0]
        if inner.kind is Kind.QUOTIENT and inner.whole is not None and inner.divisor is not None:
            return quotient_of(inner.whole, inner.divisor * divisor)
        if inner.kind is Kind.REMAINDER and inner.whole is not None and inner.divisor is not None:
            rest = inner.divisor.quotient(divisor)
            if rest is not None:
                return remainder_of(Form.of({quotient_of(inner.whole, divisor): ONE}), rest)
        extent = ceiling(inner.extent, divisor) if inner.extent is not None else None
        return Atom(Kind.QUOTIENT, 0, whole, divisor, extent=extent)
    return Atom(Kind.QUOTIENT, 0, whole, divisor)


def remainder_of(whole: Form, divisor: Polynomial) -> Atom:
    """`whole % divisor`, neither negative; n % (a b) % b is n % b."""
    if len(whole.terms) == 1 and not whole.base.terms and whole.terms[0][1] == ONE:
        inner = whole.terms[0][0]
        rest = inner.divisor.quotient(divisor) if inner.divisor is not None else None
        if inner.kind is Kind.REMAINDER and inner.whole is not None and rest is not None:
            return remainder_of(inner.whole, divisor)
    return Atom(Kind.REMAINDER, 0, whole, divisor, extent=divisor)


def moved_atom(atom: Atom, axis_of: Callable[[int], int]) -> Atom:
    """The atom as seen from a tile with other axes."""
    if atom.kind is Kind.LANE:
        return Atom(Kind.LANE, axis_of(atom.number), extent=atom.extent)
    if atom.whole is not None:
        return Atom(atom.kind, 0, atom.whole.moved(axis_of), atom.divisor, extent=atom.extent)
    if atom.reads:
        return Atom(atom.kind, atom.number, reads=frozenset(moved_atom(read, axis_of) for read in atom.reads))
    return atom


def lanes(shape: Sequence[int]) -> Iterable[Atom]:
    """The atoms of all axes of a tile that have more than one lane."""
    return (
        Atom(Kind.LANE, axis, extent=Polynomial.integer(extent)) for axis, extent in enumerate(shape) if extent != 1
    )
