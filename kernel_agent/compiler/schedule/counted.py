"""`Counted`: a number that programs and the lanes of their tiles count together, and the digits that a kernel reads of
it: of `n = pid * BLOCK + lane` the row `n // W` and the column `n % W`. Programs and lanes may be digits themselves, as
rows and columns of patches are: then an image's rows are one number, its columns another.

What moves an index, such as the taps of a window, moves digits. In terms of these an address is a linear form again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, moved_atom
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial

PARTS = (Kind.QUOTIENT, Kind.REMAINDER)


@dataclass(frozen=True)
class Digits:
    """A form in terms of the digits of one number."""

    parts: dict[int, Polynomial]
    """Coefficients by the digit's place, the lowest is 0; without zeros."""
    rest: Form
    """What does not depend on the number, and the base."""
    lane: int | None
    """Axis of the tile along which the number counts; None where only programs or digits of theirs are seen."""


@dataclass(frozen=True)
class Span:
    """Digits of a number: `whole // low`, less than high / low."""

    whole: Form
    low: Polynomial
    high: Polynomial | None
    """None: all from the low one on."""


def span_of(atom: Atom) -> Span | None:
    """What a quotient or a remainder is of its number."""
    if atom.kind not in PARTS or atom.whole is None or atom.divisor is None:
        return None
    if atom.kind is Kind.QUOTIENT:
        return Span(atom.whole, atom.divisor, None)
    terms = atom.whole.terms
    if len(terms) == 1 and not atom.whole.base.terms and terms[0][1] == ONE and terms[0][0].kind is Kind.QUOTIENT:
        inner = terms[0][0]
        assert inner.whole is not None
        assert inner.divisor is not None
        return Span(inner.whole, inner.divisor, inner.divisor * atom.divisor)
    return Span(atom.whole, ONE, atom.divisor)


@dataclass(frozen=True)
class Counted:
    """program * width + lane, with lane < width; the program itself where the width is 1."""

    program: Atom
    """An axis of the grid, or a quotient or remainder of one."""
    width: Polynomial
    places: tuple[Polynomial, ...] = (ONE,)
    """What each digit counts by, from the lowest: each a multiple of the one before."""
    part: Atom | None = None
    """Where the lane is a digit of an axis of the tile, such as the row of a patch: that, of axis 0; else None."""

    @property
    def radices(self) -> tuple[Polynomial, ...]:
        """What each digit but the highest is less than."""
        found = [high.quotient(low) for low, high in zip(self.places, self.places[1:], strict=False)]
        return tuple(radix for radix in found if radix is not None)

    def digits(self, form: Form) -> Digits | None:
        """The form in digits; None where it depends on program or lane in another way."""
        terms = form.coefficients
        parts: dict[int, Polynomial] = {}
        lane = None
        unit = terms.pop(self.program, None)
        if unit is not None:
            unit = unit.quotient(self.width)
            own = [a for a, c in terms.items() if c == unit and a.extent == self.width and self._has(a)]
            if unit is None or len(own) != (self.width != ONE):
                return None
            if own:
                del terms[own[0]]
                lane = lane_of(own[0])
            parts = {place: unit * count for place, count in enumerate(self.places)}
        rest: dict[Atom, Polynomial] = {}
        for atom, number in terms.items():
            if not self.concerns(atom):
                rest[atom] = number
                continue
            span = self._span(atom)
            if span is None or (lane is not None and span[2] not in (lane, None)):
                return None
            low, high, lane = span
            for place in range(low, high):
                factor = self.places[place].quotient(self.places[low])
                assert factor is not None
                parts[place] = parts.get(place, ZERO) + number * factor
        if lane is not None and any(lane_of(atom) == lane and not self._apart(atom) for atom in rest):
            return None
        return Digits({place: n for place, n in parts.items() if n.terms}, Form.of(rest, form.base), lane)

    def _has(self, atom: Atom) -> bool:
        """Whether an index is lanes as they count."""
        lane = lane_of(atom)
        if self.part is None or lane is None:
            return self.part is None and atom.kind is Kind.LANE
        return moved_atom(atom, lambda _: 0) == self.part

    def _apart(self, atom: Atom) -> bool:
        """Whether an index is another digit of an axis of which the lane is one."""
        return self.part is not None and _are_apart(span_of(self.part), span_of(atom))

    def concerns(self, atom: Atom) -> bool:
        """Whether an index depends on the number's programs."""
        if atom == self.program:
            return True
        if atom.kind is Kind.OPAQUE:
            return not atom.reads or not self.program.sources.isdisjoint(atom.reads)
        if atom.kind in PARTS and atom.whole is not None:
            return not self._beside(atom) and any(self.concerns(inner) for inner, _ in atom.whole.terms)
        return atom.kind is Kind.PROGRAM and atom in self.program.sources

    def _beside(self, atom: Atom) -> bool:
        """Whether an index is another digit of what the number's programs are a digit of."""
        own, other = span_of(self.program), span_of(atom)
        return own is not None and other is not None and own.whole == other.whole and _are_apart(own, other)

    def _span(self, atom: Atom) -> tuple[int, int, int | None] | None:
        """The digits, from the first on and before the second, that a quotient or a remainder consists of, and the
        axis of lanes."""
        bounds = self._borders(atom)
        if bounds is None:
            return None
        low, high, lane = bounds
        if low not in self.places or (high is not None and high not in self.places):
            return None
        return self.places.index(low), len(self.places) if high is None else self.places.index(high), lane

    def _borders(self, atom: Atom) -> tuple[Polynomial, Polynomial | None, int | None] | None:
        span = span_of(atom)
        own = replace(self, places=(ONE,)).digits(span.whole) if span is not None else None
        if span is None or own is None or own.parts != {0: ONE} or own.rest != Form():
            return None
        return span.low, span.high, own.lane

    def with_places(self, forms: Iterable[Form]) -> Counted | None:
        """With the digits that forms are made of; None where these are of different systems."""
        found = {ONE}
        for form in forms:
            for atom in _atoms(form):
                borders = self._borders(atom) if self.concerns(atom) else None
                if borders is not None:
                    low, high, _ = borders
                    found |= {low} if high is None else {low, high}
        places = [ONE]
        left = found - {ONE}
        while left:
            following = [p for p in left if all(other == p or other.quotient(p) is not None for other in left)]
            if len(following) != 1 or following[0].quotient(places[-1]) is None:
                return None
            places.append(following[0])
            left.remove(following[0])
        return replace(self, places=tuple(places))


def lane_of(atom: Atom) -> int | None:
    """The axis of a tile along which an index counts lanes, or is a digit of their number; None of other indices."""
    if atom.kind is Kind.LANE:
        return atom.number
    span = span_of(atom)
    if span is None or span.whole.base.terms or len(span.whole.terms) != 1:
        return None
    ((lane, number),) = span.whole.terms
    return lane.number if lane.kind is Kind.LANE and number == ONE else None


def _are_apart(one: Span | None, other: Span | None) -> bool:
    """Whether two spans of one number have no digit in common."""
    if one is None or other is None:
        return False
    return (one.high is not None and other.low.quotient(one.high) is not None) or (
        other.high is not None and one.low.quotient(other.high) is not None
    )


def counted(seen: Iterable[Form]) -> list[Counted]:
    """The numbers that forms are made of."""
    found: dict[tuple[Atom, Polynomial, Atom | None], Counted] = {}
    alone: dict[Atom, Counted] = {}
    everything = list(seen)
    for form in everything:
        for part in (form, *(atom.whole for atom in _atoms(form) if atom.whole is not None)):
            for program, number in part.terms:
                if not program.sources or any(source.kind is not Kind.PROGRAM for source in program.sources):
                    continue
                for lane, unit in part.terms:
                    if lane_of(lane) is not None and lane.extent is not None and number == unit * lane.extent:
                        digit = None if lane.kind is Kind.LANE else moved_atom(lane, lambda _: 0)
                        key = program, lane.extent, digit
                        found.setdefault(key, Counted(program, lane.extent, part=digit))
                if part is form:
                    alone.setdefault(program, Counted(program, ONE))
    paired = {program for program, _, _ in found}
    found |= {(program, ONE, None): one for program, one in alone.items() if program not in paired}
    return [one for bare in found.values() if (one := bare.with_places(everything)) is not None]


def _atoms(form: Form) -> Iterator[Atom]:
    for atom, _ in form.terms:
        yield atom
        if atom.whole is not None:
            yield from _atoms(atom.whole)
