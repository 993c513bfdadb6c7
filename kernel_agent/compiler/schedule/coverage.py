"""`covered_if`: when the stores of a gradient reach every element there is, so that nothing need hold zeros before.

A kernel does not know the shape of a tensor. But stores to addresses that are all different, within the tensor, as the
forward's loads were, reach all its elements exactly if they are as many: so they are counted. Where any of several
conditions is enough for a store, one under which the stores are as many is. Rows of segments are counted by the bounds
that a launch has in memory.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from kernel_agent.compiler.plan import LONGEST, ROWS, Axis
from kernel_agent.compiler.schedule.claims import Claim, Claims, Rising, conjunction, open_claims
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.injective import scale
from kernel_agent.compiler.schedule.limits import Limits, alternatives
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, lanes, quotient_of, remainder_of
from kernel_agent.compiler.schedule.once import Once
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial, ceiling
from kernel_agent.compiler.schedule.segments import Segment, segments, without_lengths
from kernel_agent.compiler.schedule.sheared import counted_in_step
from kernel_agent.compiler.schedule.sites import (
    Bound,
    Site,
    follows,
    loop_bound,
    loop_bounds,
    loop_forms,
)
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


def domain(forms: Forms, site: Site) -> frozenset[Atom]:
    """What tells one write at a site from another: programs, trips of the loops around, lanes."""
    read = {op.attributes["axis"] for op in forms.kernel.ops if op.code is Code.PROGRAM_ID}
    programs = frozenset(forms.program(axis) for axis in range(len(forms.launch.grid)) if axis in read)
    trips = frozenset(forms.trip(loop) for loop in site.loops if loop.code is Code.FOR)
    return programs | trips | frozenset(lanes(site.op.offset.shape))


@dataclass(frozen=True)
class Coverage:
    """How many elements writes reach."""

    count: Polynomial
    claims: Claims
    """For that."""

    def condition(self, tensor: str) -> str:
        """The expression under which these are all elements of a tensor."""
        same = f"{tensor}.numel() == {self.count.text()}"
        return " and ".join(text for text in (same, conjunction(self.claims)) if text)

    def beside(self, other: Coverage) -> Coverage:
        """Together with others, of other elements."""
        return Coverage(self.count + other.count, tuple(dict.fromkeys((*self.claims, *other.claims))))


def coverage(forms: Forms, written: Sequence[Site]) -> Coverage | None:
    """What writes reach that are proved to meet no element twice; None where that is not known."""
    counter = Counter(forms)
    counts = [counter.count(site) for site in written]
    whole = Polynomial()
    for count in counts:
        if count is None:
            return None
        whole = whole + count
    claims = open_claims(counter.claims)
    return None if claims is None or not whole.printable else Coverage(whole, claims)


def covered_if(forms: Forms, written: Sequence[Site], tensor: str) -> str:
    """The expression under which writes to different addresses cover a tensor; empty where none is known.

    `written`: all writes to its gradient, proved to meet no element twice. The gradient's elements must lie in memory
    without gaps, in whatever order.
    """
    found = coverage(forms, written)
    return "" if found is None else found.condition(tensor)


def stored_axes(forms: Forms, written: Sequence[Site]) -> tuple[Axis, ...]:
    """The axes that one write covers, if it covers what it is thought to; empty where they are not known."""
    if len(written) != 1:
        return ()
    counter = Counter(forms)
    address = forms.of(written[0].op.offset)
    axes = counter.axes if counter.count(written[0]) is not None and not address.base.terms else []
    axes = [one for part, size in axes for one in _parts(address, part, size)]
    found = []
    for part, size in axes:
        stride = scale(address.coefficients, part)
        if stride is None or not (stride.printable and size.printable):
            return ()
        found.append(Axis(stride.text(), size.text()))
    covered = {atom for part, _ in axes for atom, _ in part.terms}
    return tuple(found) if covered == set(address.coefficients) else ()


def _parts(address: Form, part: Form, size: Polynomial) -> list[tuple[Form, Polynomial]]:
    """An axis as the quotient and the remainder by which an address has it. Where the divisor does not divide the size
    these are more elements than there are, so that a tensor's axes are others."""
    for atom, _ in address.terms:
        if atom.kind is Kind.REMAINDER and atom.whole == part and atom.divisor is not None:
            high, low = quotient_of(part, atom.divisor), remainder_of(part, atom.divisor)
            return [(Form.of({high: ONE}), ceiling(size, atom.divisor)), (Form.of({low: ONE}), atom.divisor)]
    return [(part, size)]


def _remainder_of_one(atom: Atom) -> Atom | None:
    """The remainder that an atom is the quotient or the remainder of, as `n % a` of `n % a // b`."""
    if atom.whole is None or atom.kind not in (Kind.QUOTIENT, Kind.REMAINDER) or atom.whole.base.terms:
        return None
    inner = [part for part, number in atom.whole.terms if number == ONE and part.kind is Kind.REMAINDER]
    return inner[0] if len(inner) == len(atom.whole.terms) == 1 else None


def _is_within(bound: Bound, other: Bound) -> bool:
    """Whether a sum of indices that is below its bound has some of them, with the same factors, below another one."""
    whole = bound.form.coefficients
    return bound.below == other.below and all(whole.get(atom) == number for atom, number in other.form.terms)


@dataclass
class Counter:
    """Counts what is written, and notes on what that relies."""

    forms: Forms
    claims: list[Claim | Rising] = field(default_factory=list)
    axes: list[tuple[Form, Polynomial]] = field(default_factory=list)
    """Sums of indices that take every value below a number, one apart from the other."""
    limited: Sequence[Bound] = ()
    """What masks say where stores are counted."""
    digits: list[Bound] = field(default_factory=list)
    """Sums of indices that take every value below a number, as parts of those."""
    apart: frozenset[Atom] = frozenset()
    """Indices that are not counted: each of their values has as many stores."""

    def count(self, site: Site) -> Polynomial | None:
        """How many (program, trip, lane) take part, or at least do; None where that is not known."""
        claims, axes = len(self.claims), len(self.axes)
        for masks in alternatives(site.op.mask):
            found = self.count_where(site, masks)
            if found is not None:
                return found
            del self.claims[claims:], self.axes[axes:]
        found = counted_in_step(self, site)
        if found is not None:
            return found
        del self.claims[claims:], self.axes[axes:]
        for segment in segments(self.forms, site):
            found = self.count_where(site, [] if site.op.mask is None else [site.op.mask], segment)
            if found is not None:
                return found
            del self.claims[claims:], self.axes[axes:]
        return None

    def count_where(
        self, site: Site, masks: Sequence[Value | Once], within: Segment | None = None
    ) -> Polynomial | None:
        """The same where the site's mask is that all of some hold, and where places are within segments."""
        known = Limits.floored(self.forms, site, masks, within, self.apart)
        if known is None or any(loop.code is Code.WHILE for loop in site.loops):
            return None
        self.digits, self.limited = [], known.bounds
        rest = {atom: self.extent(site, atom) for atom in domain(self.forms, site) - self.apart}
        known.cut_off(rest)
        limits, floors = known.within_others(rest), known.floors
        self.claims += known.claims
        self.split_runs(site, limits, rest)
        self.split(site, limits, rest)
        count = ONE
        if within is not None:
            rows = self.rows(site, within, limits, rest)
            if rows is None:
                return None
            count = rows
            limits = [bound for bound in limits if bound.form != within.rest]
        for bound in sorted(limits, key=lambda bound: -bound.size):
            if bound in self.digits and bound.form not in floors.sums:
                continue
            if not all(atom in rest for atom, _ in bound.form.terms) or not self.dense(site, bound, rest):
                return None
            for atom, _ in bound.form.terms:
                del rest[atom]
            low = floors.sums.get(bound.form)
            if low is None:
                self.axes.append((bound.form, bound.below))
            else:
                self.claims += [Claim(low, ZERO), Claim(bound.below, low)]
            count = count * floors.width(bound).below
        for loop, own in self._ends(site):
            if self.forms.trip(loop) not in rest:
                continue
            if not all(atom in rest for atom, _ in own.form.terms) or not self.dense(site, own, rest):
                return None
            for atom, _ in own.form.terms:
                del rest[atom]
            self.axes.append((own.form, own.below))
            count = count * own.below
        for atom in sorted(rest, key=lambda atom: atom.key):
            extent = rest[atom]
            if extent is None:
                return None
            self.axes.append((Form.of({atom: ONE}), extent))
            count = count * extent
        return count

    def rows(
        self, site: Site, segment: Segment, limits: Sequence[Bound], rest: dict[Atom, Polynomial | None]
    ) -> Polynomial | None:
        """Places in all segments, if each has as many stores; None where that is not known. Takes what tells segments
        and places apart out of `rest`."""
        places = segment.rest.coefficients
        number = next((atom for atom in rest if segment.number == Form.of({atom: ONE})), None)
        extent = rest[number] if number is not None else None
        if number is None or extent is None or not extent.printable:
            return None
        if segment.rest.base.terms or not all(atom in rest for atom in places):
            return None
        mixed = [bound for bound in limits if bound.form != segment.rest]
        if any(atom == number or atom in places for bound in mixed for atom, _ in bound.form.terms):
            return None
        longest = Polynomial.symbol(f"{LONGEST}({segment.bounds}, {extent.text()})")
        self.claims += [Claim(bound.below, longest) for bound in limits if bound.form == segment.rest]
        loops = [loop for loop in site.loops if loop.code is Code.FOR and self.endless(loop, segment)]
        inner, below = dict(places), longest
        if loops:
            below = inner.pop(self.forms.trip(loops[0]))
        if (inner or below != ONE) and not self.dense(site, Bound(Form.of(inner), below), rest):
            return None
        for atom in (number, *places):
            del rest[atom]
        return Polynomial.symbol(f"{ROWS}({segment.bounds}, {extent.text()})")

    def endless(self, loop: Op, segment: Segment) -> bool:
        """Whether a loop steps through a segment up to its end, however long that is. It may go on by as much as other
        segments are long, which are not shorter than nothing where their bounds rise."""
        ends = loop_forms(self.forms, loop)
        if self.forms.trip(loop) not in segment.rest.coefficients:
            return False
        for end in ends:
            if follows(end, segment.negative):
                continue
            further, rising = without_lengths(self.forms, segment.negative - end)
            if not further.not_negative:
                return False
            self.claims += rising
        return True

    def _ends(self, site: Site) -> list[tuple[Op, Bound]]:
        """Loops that start or step by what tells programs or other trips apart, with the bounds of their indices; first
        those whose index has most of the others in it."""
        found = [(loop, own) for loop in site.loops if (own := loop_bound(self.forms, loop)) is not None]
        return sorted(((loop, own) for loop, own in found if own.size > 1), key=lambda one: -one[1].size)

    def extent(self, site: Site, atom: Atom) -> Polynomial | None:
        """How many values an index takes where no mask bounds it. Of lanes as the source calls it."""
        if atom.kind is Kind.LANE:
            for source in self.forms.of(site.op.offset).sources:
                if source == atom:
                    return source.extent
        return atom.extent

    def split(self, site: Site, limits: Sequence[Bound], rest: dict[Atom, Polynomial | None]) -> None:
        """Put the digits of an index, which the address or a bound has, for the index: `pid // C` and `pid % C`."""
        address = self.forms.of(site.op.offset)
        digits = {atom for form in (address, *(bound.form for bound in limits)) for atom, _ in form.terms}
        wholes = {inner for atom in digits if (inner := _remainder_of_one(atom)) is not None} - digits
        digits |= wholes
        left = [atom for atom, extent in rest.items() if extent is not None]
        while left:
            atom = left.pop(0)
            size = rest[atom]
            whole = Form.of({atom: ONE})
            while size is not None:
                radix = {one.divisor for one in digits if one.kind is Kind.REMAINDER and one.whole == whole}
                divisor = radix.pop() if len(radix) == 1 and (atom in wholes or atom not in digits) else None
                if divisor is None:
                    break
                count = ceiling(size, divisor)
                self.claims.append(Claim(size, count * divisor))
                del rest[atom]
                lower = remainder_of(whole, divisor)
                rest[lower] = divisor
                left.append(lower)
                atom, size = quotient_of(whole, divisor), count
                rest[atom] = size
                whole = Form.of({atom: ONE})

    def split_runs(self, site: Site, limits: Sequence[Bound], rest: dict[Atom, Polynomial | None]) -> None:
        """Put the digits of the number that a program and the trip of a loop make, where programs have runs of so many
        each, for these: `(chunk * each + trip) // across` and the remainder."""
        forms = (self.forms.of(site.op.offset), *(bound.form for bound in limits))
        digits = {atom for form in forms for atom, _ in form.terms if atom.kind is Kind.REMAINDER}
        for loop in site.loops:
            run = self.forms.of(loop.blocks[0].arguments[0])
            radix = {atom.divisor for atom in digits if atom.whole == run}
            ends = self._ends_of(loop, run)
            if len(radix) != 1 or not ends or not all(atom in rest for atom, _ in run.terms):
                continue
            (divisor,), below = radix, ends[0]
            if divisor is None or not self.dense(site, Bound(run, below), rest):
                continue
            count = ceiling(below, divisor)
            self.claims += [Claim(number, ZERO) for _, number in run.terms if not number.surely(0)]
            self.claims += [Claim(other, below) for other in ends[1:]]
            self.claims.append(Claim(below, count * divisor))
            for atom, _ in run.terms:
                del rest[atom]
            rest[remainder_of(run, divisor)] = divisor
            rest[quotient_of(run, divisor)] = count

    def _ends_of(self, loop: Op, run: Form) -> list[Polynomial]:
        """What an index, of several terms, is less than in all trips of a loop, the shortest first, where else at most
        the length of a run ends it; none where more does."""
        if loop.code is not Code.FOR or len(run.terms) < 2 or run.base.terms:
            return []
        left = loop_forms(self.forms, loop)
        own = [form for form in left if form.terms == run.terms]
        lengths = [form for form in left if {atom for atom, _ in form.terms} == {self.forms.trip(loop)}]
        ends = {-form.base for form in own}
        known = len(own) + len(lengths) == len(left) and len(lengths) <= 1
        return sorted(ends, key=lambda end: (len(end.text()), end.text())) if known else []

    def dense(self, site: Site, bound: Bound, extents: dict[Atom, Polynomial | None]) -> bool:
        """Whether the bounded sum takes every value from 0 up to its bound: a mixed-radix number without gaps."""
        rest, width = bound.form.coefficients, ONE
        while rest:
            atom = next((atom for atom, coefficient in rest.items() if coefficient == width), None)
            if atom is None:
                return False
            del rest[atom]
            reach = self.reach(site, atom, bound, rest)
            if not rest and reach == bound.below:
                return True
            extent = extents[atom] or self.cut(site, atom, bound)
            if extent is None and reach is None:
                return False
            if not rest and extent == ceiling(bound.below, width):
                return True
            inner = Form.of({one: number for one, number in bound.form.terms if one not in rest})
            if reach is not None and Bound(inner, reach) in self.limited:
                extent = None  # a mask ends the last trip where the loop ends
            width = width * extent if extent is not None else reach or ONE
            self.digits.append(Bound(inner, width))
        self.claims.append(Claim(width, bound.below))
        return True

    def cut(self, site: Site, atom: Atom, bound: Bound) -> Polynomial | None:
        """Trips of a loop that the bound alone may end early, as the last segment of a longer loop, which may be one of
        segments itself; None of others."""
        for loop in site.loops:
            if loop.code is not Code.FOR or self.forms.trip(loop) != atom:
                continue
            ends = [one for one in loop_bounds(self.forms, loop) if one.size > 1]
            if ends and all(_is_within(bound, one) or self._is_whole(site, one) for one in ends):
                return self._own(site, atom)
        return None

    def _own(self, site: Site, atom: Atom) -> Polynomial | None:
        """How many trips a loop makes at most by its own length."""
        for loop in site.loops:
            if loop.code is not Code.FOR or self.forms.trip(loop) != atom:
                continue
            ends = loop_bounds(self.forms, loop)
            own = [one.below.quotient(one.form.coefficients[atom]) for one in ends if one.size == 1]
            if own:
                return own[0] if len(own) == 1 else None
        return None

    def _is_whole(self, site: Site, bound: Bound) -> bool:
        """Whether a sum of trips is below its bound by what each loop makes alone."""
        most = ZERO
        for atom, number in bound.form.terms:
            own = self._own(site, atom)
            if own is None:
                return False
            most = most + number * (own - ONE)
        return Claim(bound.below, most + ONE).proved

    def reach(self, site: Site, atom: Atom, bound: Bound, larger: Container[Atom]) -> Polynomial | None:
        """What the sum of a trip and of all smaller indices takes every value below of: as far as the loop goes, in
        units of what the other indices fill. None where no loop says. `larger`: indices that are no part of it."""
        inside = bound.form.coefficients
        for loop in site.loops:
            own = loop_bound(self.forms, loop)
            if loop.code is not Code.FOR or self.forms.trip(loop) != atom or own is None:
                continue
            if any(inner in larger for inner, _ in own.form.terms):
                continue
            unit = inside[atom].quotient(own.form.coefficients[atom])
            if unit is not None and all(inside.get(inner) == number * unit for inner, number in own.form.terms):
                return own.below * unit
        return None
