"""`in_ranges`: a proof that several writes meet nowhere because each has a range of columns of its own.

A rotated half, the other half and what is passed on are three ranges of one row: tiles of different sizes, under
different masks, whose places differ by more than sums of a few distances. Seen as one write whose column goes through
all of the ranges, they are a number with digits like any other (see `injective`), and the column says which write it
is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.claims import Claim, Rising, open_claims
from kernel_agent.compiler.schedule.injective import Injectivity, injective, scale
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Monomial, Polynomial
from kernel_agent.compiler.schedule.sites import Bound

MOST_WRITES = 6
MOST_WAYS = 24
"""Ways to take the columns of all writes that are tried."""


@dataclass(frozen=True)
class Write:
    """One of the writes."""

    form: Form
    """Of its address."""
    bounds: tuple[Bound, ...]
    """What holds where it takes part."""
    needed: frozenset[Atom]
    """What tells one element of it from another."""


@dataclass(frozen=True)
class Columns:
    """What of a write's address is taken for the column."""

    index: Form
    """Without a base, at least 0."""
    ends: tuple[Polynomial, ...]
    """It is less than each."""
    step: Polynomial
    """From column to column."""
    rest: Form
    """Of the address: the row."""
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class _Range:
    """The columns from `low` that are fewer than each of `sizes`."""

    low: Polynomial
    sizes: tuple[Polynomial, ...]

    @property
    def highs(self) -> list[Polynomial]:
        """They are less than each."""
        return [self.low + size for size in self.sizes]

    def where_written(self, claim: Claim) -> Claim:
        """The claim as it matters: only if there are columns, so that their number is at least 1."""
        terms: dict[Monomial, int] = {}
        for monomial, count in (claim.left - claim.right).terms:
            told = tuple(
                replace(one, positive=one.positive or Polynomial.of({(one,): 1}) in self.sizes) for one in monomial
            )
            terms[told] = count
        return Claim(Polynomial.of(terms), ZERO).reduced


def in_ranges(writes: Sequence[Write], calls: Calls) -> Injectivity | None:
    """The proof that all elements of all writes are different; None where there is none."""
    if not 1 < len(writes) <= MOST_WRITES:
        return None
    for first in _columns(writes[0]):
        others = [[one for one in _columns(write) if _beside(one, first)] for write in writes[1:]]
        for chosen in islice(product([first], *others), MOST_WAYS):
            found = _together(writes, chosen, calls)
            if found is not None:
                return found
    return None


def _columns(write: Write) -> Iterator[Columns]:
    """What may be the column: what a mask bounds, or an index as far as its tile or loop goes."""
    terms = write.form.coefficients
    ends: dict[Form, dict[Polynomial, None]] = {}
    steps: dict[Form, list[Claim]] = {}
    for bound in write.bounds:
        ends.setdefault(bound.form, {})[bound.below] = None
        steps.setdefault(bound.form, []).extend(Claim(number, ZERO) for number in bound.steps)
    for atom in terms:
        if atom.extent is not None:
            ends.setdefault(Form.of({atom: ONE}), {})[atom.extent] = None
    for index, below in ends.items():
        step = scale(terms, index)
        inner = [bound for bound in write.bounds if bound.size < len(index.terms)]
        proof = step and injective(index, inner, frozenset(index.coefficients))
        if not step or not proof or len(proof.orders) > 1 or any(not isinstance(c, Claim) for c in proof.claims):
            continue
        claims = [claim for claim in (*proof.claims, *proof.orders[0]) if isinstance(claim, Claim)]
        rest = Form.of({a: c for a, c in terms.items() if a not in index.coefficients}, write.form.base)
        yield Columns(index, tuple(below), step, rest, (*claims, *steps.get(index, ())))


def _beside(one: Columns, other: Columns) -> bool:
    """Whether two writes have columns of the same rows."""
    if one.step != other.step or one.rest.terms != other.rest.terms:
        return False
    extents = ({atom: atom.extent for atom in columns.rest.sources} for columns in (one, other))
    return next(extents) == next(extents)


def _together(writes: Sequence[Write], chosen: Sequence[Columns], calls: Calls) -> Injectivity | None:
    """The proof for one choice of columns."""
    for lowest in chosen:
        starts = [(one.rest.base - lowest.rest.base).quotient(lowest.step) for one in chosen]
        if any(start is None or (-start).likely(1) for start in starts):
            continue
        ranges = [_Range(s, one.ends) for s, one in zip(starts, chosen, strict=True) if s is not None]
        claims = [claim for one in chosen for claim in one.claims]
        claims += [one.where_written(Claim(one.low, ZERO)) for one in ranges]
        order = _apart(ranges, calls)
        if order is None:
            continue
        for end in dict.fromkeys(high for one in ranges for high in one.highs):
            inside = [_easiest([one.where_written(Claim(end, high)) for high in one.highs], calls) for one in ranges]
            known = open_claims([*claims, *order, *(claim for claim in inside if claim is not None)])
            if known is None or None in inside or calls.refute(claim.text() for claim in known):
                continue
            proof = _rows(writes, chosen, lowest, end, calls)
            if proof is not None:
                orders = tuple(
                    tuple(one.reduced if isinstance(one, Claim) else one for one in order) for order in proof.orders
                )
                return replace(proof, claims=(*proof.claims, *_strongest(known, orders[0])), orders=orders)
    return None


def _apart(ranges: Sequence[_Range], calls: Calls) -> list[Claim] | None:
    """That of each two ranges one ends before the other begins; None where the calls show that neither does."""
    found = []
    for place, one in enumerate(ranges):
        for other in ranges[:place]:
            ways = [Claim(one.low, high) for high in other.highs] + [Claim(other.low, high) for high in one.highs]
            way = _easiest([one.where_written(other.where_written(way)) for way in ways], calls)
            if way is None:
                return None
            found.append(way)
    return found


def _easiest(ways: Sequence[Claim], calls: Calls) -> Claim | None:
    """One of claims of which any is enough, if possible a proved one; None where the calls show all to be wrong."""
    left = [way for way in ways if open_claims([way]) is not None and not calls.refute([way.text()])]
    return next((way for way in left if way.proved), left[0] if left else None)


def _strongest(claims: Iterable[Claim | Rising], known: Iterable[Claim | Rising]) -> list[Claim | Rising]:
    """Those that follow neither from another one nor from one that is known."""
    found: list[Claim | Rising] = [one for one in known if isinstance(one, Claim)]
    begun = len(found)
    for claim in sorted((one for one in claims if isinstance(one, Claim)), key=lambda one: one.text()):
        if any(_follows(claim, other) for other in found):
            continue
        found[begun:] = [other for other in found[begun:] if not _follows(other, claim)] + [claim]
    return found[begun:]


def _follows(claim: Claim | Rising, other: Claim | Rising) -> bool:
    """Whether a claim holds wherever another one does."""
    if not (isinstance(claim, Claim) and isinstance(other, Claim)):
        return claim == other
    return (claim.left - claim.right - (other.left - other.right)).surely(0)


def _rows(
    writes: Sequence[Write], chosen: Sequence[Columns], lowest: Columns, end: Polynomial, calls: Calls
) -> Injectivity | None:
    """The proof for one write whose column goes up to an end, in rows that all of the writes have."""
    column = Atom(Kind.COPY, 0, extent=end)
    form = lowest.rest + Form.of({column: lowest.step})
    kept = [bound for bound in writes[0].bounds if all(bound in write.bounds for write in writes)]
    rows = set(lowest.rest.coefficients)
    kept = [bound for bound in kept if rows.issuperset(bound.form.coefficients)]
    needed = {column}
    for write, columns in zip(writes, chosen, strict=True):
        needed |= write.needed - columns.index.sources
    return injective(form, [*kept, Bound(Form.of({column: ONE}), end)], frozenset(needed), calls)
