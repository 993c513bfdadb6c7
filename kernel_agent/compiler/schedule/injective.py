"""Whether an address tells which program, trip and lane it is of: a proof by nested strides.

A sum of c_i * x_i with 0 <= x_i < n_i determines all x_i if, in some order from the inside out, each c_i is at least
1 + the sum of c_j * (n_j - 1) over the x_j inside: a mixed-radix number with gaps. Masks make several indices one: with
`pid * BLOCK + lane < N` the sum is itself such an x, with n = N.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from kernel_agent.compiler.plan import NESTED
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.claims import Claim, Claims, Rising, any_of, open_claims
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, quotient_of
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Known, Polynomial, ceiling, known_of, total
from kernel_agent.compiler.schedule.segments import Segment
from kernel_agent.compiler.schedule.sites import Bound

MOST_DIGITS = 7
"""Indices whose orders are tried."""
MOST_WRITTEN = 2
"""Orders that a fact spells out; of more it says what they have in common."""


@dataclass(frozen=True)
class Digit:
    """One index of the mixed-radix number."""

    coefficient: Polynomial
    extents: tuple[Polynomial, ...]
    """Numbers it is known to be less than; empty where none is."""
    falls: bool = False
    """It counts down: the coefficient is that of what is left to its end."""


@dataclass(frozen=True)
class Injectivity:
    """An address determines its indices if what is left to check holds."""

    claims: Claims
    """Each must hold."""
    orders: tuple[Claims, ...] = ((),)
    """All claims of one of these must hold."""
    digits: tuple[Digit, ...] = ()

    def facts(self) -> list[str]:
        """Python expressions to check at a launch, in the simplest words; none where all is proved."""
        found = [claim.text() for claim in self.claims]
        texts = [any_of(self.orders)] if len(self.orders) <= MOST_WRITTEN else self._in_any_order()
        return [*found, *filter(None, texts)]

    def _in_any_order(self) -> list[str]:
        """What all orders have in common: those with an extent nest, and one without lies around them."""
        known = [digit for digit in self.digits if digit.extents]
        sides = ", ".join(f"({digit.coefficient.text()}, {digit.extents[0].text()})" for digit in known)
        reach = total(digit.coefficient * (digit.extents[0] - ONE) for digit in known)
        around = [Claim(digit.coefficient, reach + ONE).reduced for digit in self.digits if not digit.extents]
        return [f"{NESTED}({sides})", *(claim.text() for claim in around)]


def injective(
    form: Form,
    bounds: Sequence[Bound],
    needed: frozenset[Atom],
    calls: Calls | None = None,
    beside: frozenset[Atom] = frozenset(),
    within: Sequence[Segment] = (),
) -> Injectivity | None:
    """The proof that a value of `form` belongs to one assignment of the `needed` atoms; None where there is none.

    `bounds` hold of all assignments. Atoms of the form that are not needed are allowed: they count as needed. What is
    left to check holds in all `calls`. `beside`: atoms that are known without the value. `within`: segments that hold
    of all assignments.
    """
    places = {}
    for segment in within:
        factor = form.coefficients.get(segment.begin)
        if factor is not None:
            form = form - segment.place.times(factor) + Form.of({segment.atom: factor})
            places[segment.atom] = segment
    if any(atom.kind is Kind.OPAQUE for atom, _ in form.terms):
        return None
    claims = _determines(frozenset(atom for atom, _ in form.terms) | beside, bounds, needed, places)
    if claims is None:
        return None
    best: Injectivity | None = None
    for digits, inner in groupings(form, bounds):
        found = ordered(digits, (*claims, *inner))
        if found is None or (calls is not None and calls.refute(found.facts())):
            continue
        if best is None or _cost(found) < _cost(best):
            best = found
            if _cost(best) == 0:
                break
    return best


def _cost(found: Injectivity) -> int:
    """How much is left to check."""
    return len(found.claims) + min(len(order) for order in found.orders) + (len(found.orders) > MOST_WRITTEN)


def _determines(
    known: frozenset[Atom], bounds: Sequence[Bound], needed: frozenset[Atom], places: Mapping[Atom, Segment]
) -> Claims | None:
    """Claims by which the known atoms tell the needed ones: quotient and remainder together tell the whole, the digits
    of a number, `n // (a b)`, `n // b % a` and `n % b`, tell it one after the other, a place its segment and its
    distance from the begin of that, and a remainder an index that it only turns around."""
    found = {*known, *(index for atom in known if (index := _turned(atom, bounds)) is not None)}
    claims: list[Claim | Rising] = []
    grown = True
    while grown:
        grown = False
        for atom in sorted(found, key=lambda atom: atom.key):
            if atom in places:
                segment = places[atom]
                told = segment.number
                if {part for part, _ in told.terms} <= found:
                    told = Form.of({part: c for part, c in segment.rest.terms if not _is_known(part, found)})
                inner = {part for part, _ in told.terms}
                proof = None if inner <= found else injective(told, bounds, frozenset(inner))
                if proof is not None and len(proof.orders) == 1:
                    claims += [*proof.claims, *proof.orders[0], Rising(segment.bounds)]
                    found |= inner
                    grown = True
                continue
            if atom.kind is not Kind.REMAINDER or atom.whole is None or atom.divisor is None:
                continue
            inner = {part for part, _ in atom.whole.terms}
            if quotient_of(atom.whole, atom.divisor) not in found or inner <= found:
                continue
            proof = injective(atom.whole, [b for b in bounds if b.form != atom.whole], frozenset(inner))
            if proof is None or len(proof.orders) > 1:
                return None
            claims += [*proof.claims, *proof.orders[0], Claim(atom.divisor, ONE)]
            found |= inner
            grown = True
    return open_claims(claims) if needed <= found else None


def _turned(atom: Atom, bounds: Sequence[Bound]) -> Atom | None:
    """The index that a remainder tells: the n of `(n + k) % d` that takes no more than d values."""
    if atom.kind is not Kind.REMAINDER or atom.whole is None or atom.divisor is None or len(atom.whole.terms) != 1:
        return None
    ((index, step),) = atom.whole.terms
    ends = [bound.below for bound in bounds if bound.form == Form.of({index: ONE})]
    ends += [index.extent] if index.extent is not None else []
    return index if step == ONE and any((atom.divisor - end).surely(0) for end in ends) else None


def _is_known(part: Atom, found: Set[Atom]) -> bool:
    """Whether an opaque atom depends on nothing but what is known."""
    return part.kind is Kind.OPAQUE and bool(part.reads) and part.reads <= found


def groupings(form: Form, bounds: Sequence[Bound]) -> Iterator[tuple[list[Digit], Claims]]:
    """Ways to see the terms as digits: by the bounds of several atoms, the larger first, and without these."""
    several = [bound for bound in bounds if bound.size > 1]
    for used in range(1 << min(len(several), 4)):
        chosen = [bound for place, bound in enumerate(several) if not used >> place & 1]
        found = _grouped(form, chosen, bounds)
        if found is not None:
            yield found


def _grouped(form: Form, chosen: Sequence[Bound], bounds: Sequence[Bound]) -> tuple[list[Digit], Claims] | None:
    """Digits, with those that the chosen bounds make one; None where one of them does not fit."""
    rest = form.coefficients
    digits: list[Digit] = []
    claims: list[Claim | Rising] = []
    for bound in chosen:
        multiple = scale(rest, bound.form)
        inner = [other for other in bounds if other.size < bound.size]
        proof = multiple and injective(bound.form, inner, frozenset(atom for atom, _ in bound.form.terms))
        if not multiple or proof is None or not proof or len(proof.orders) > 1:
            return None
        claims += [*proof.claims, *proof.orders[0], *(Claim(step, ZERO) for step in bound.steps)]
        for atom, _ in bound.form.terms:
            del rest[atom]
        digits.append(_upward(multiple, (bound.below,)))
    for atom, coefficient in rest.items():
        alone = [bound.below for bound in bounds if bound.form == Form.of({atom: ONE})]
        if atom.kind is Kind.QUOTIENT and atom.divisor is not None:
            alone += [ceiling(bound.below, atom.divisor) for bound in bounds if bound.form == atom.whole]
        if atom.extent is None:
            alone += _in_steps(atom, bounds)
        known = [atom.extent] if atom.extent is not None else []
        digits.append(_upward(coefficient, (*alone, *known)))
    return digits, tuple(claims)


def _in_steps(atom: Atom, bounds: Sequence[Bound]) -> list[Polynomial]:
    """What an index is less than where steps of it are bounded: trips of a loop over a program's own part of a range,
    whose end is the smaller one of that and the whole range."""
    found = []
    for bound in bounds:
        if len(bound.form.terms) == 1 and not bound.steps and not bound.form.base.terms:
            ((own, step),) = bound.form.terms
            if own == atom and step.surely(1):
                found.append(ceiling(bound.below, step))
    return found


def _upward(coefficient: Polynomial, extents: tuple[Polynomial, ...]) -> Digit:
    """A digit; an index that counts down is one that counts up."""
    falls = (-coefficient).likely(1)
    return Digit(-coefficient if falls else coefficient, extents, falls)


def scale(terms: dict[Atom, Polynomial], part: Form) -> Polynomial | None:
    """m where the terms have m times the coefficient of every atom of a form."""
    found: Polynomial | None = None
    for atom, number in part.terms:
        if atom not in terms:
            return None
        if found is None:
            found = terms[atom].quotient(number)
        if found is None or number * found != terms[atom]:
            return None
    return found


def ordered(digits: Sequence[Digit], claims: Claims) -> Injectivity | None:
    """The proof by the best orders of the digits.

    Schedules ask the same of one kernel after the other, whose indices are other values but whose numbers are equal.
    """
    numbers = [number for digit in digits for number in (digit.coefficient, *digit.extents)]
    numbers += [side for claim in claims if isinstance(claim, Claim) for side in (claim.left, claim.right)]
    return _ordered(tuple(digits), claims, known_of(numbers))


@functools.lru_cache(maxsize=1 << 12)
def _ordered(digits: tuple[Digit, ...], claims: Claims, _: Known) -> Injectivity | None:
    known = open_claims(claims)
    if known is None or len(digits) > MOST_DIGITS:
        return None
    orders = sorted(_Orders(digits).best, key=lambda order: [claim.text() for claim in order])
    return Injectivity(known, tuple(orders), digits) if orders else None


class _Orders:
    """What the best orders of digits from the inside out leave to check."""

    def __init__(self, digits: Sequence[Digit]) -> None:
        self._digits = digits
        self._found: dict[tuple[tuple[int, ...], tuple[Polynomial, ...]], frozenset[Claims]] = {}
        self.best = self._behind(tuple(range(len(digits))), (ZERO,))
        """The shortest, all of one length; none where there is no order."""

    def _behind(self, places: tuple[int, ...], reach: tuple[Polynomial, ...]) -> frozenset[Claims]:
        """The shortest that orders of these digits leave. `reach`: upper limits of the sum of what is inside.

        What lies inside counts by its reach alone, which several orders of it share.
        """
        if not places:
            return frozenset(((),))
        key = (places, reach)
        if key not in self._found:
            self._found[key] = self._shortest(places, reach)
        return self._found[key]

    def _shortest(self, places: tuple[int, ...], reach: tuple[Polynomial, ...]) -> frozenset[Claims]:
        best: set[Claims] = set()
        length: float = math.inf
        for place in places:
            digit, rest = self._digits[place], tuple(other for other in places if other != place)
            if rest and not digit.extents:
                continue
            tried = [open_claims([Claim(digit.coefficient, limit + ONE)]) for limit in reach]
            kept = [found for found in tried if found is not None]
            if not kept:
                continue
            least = min(kept, key=len)
            wider = [limit + digit.coefficient * (extent - ONE) for limit in reach for extent in digit.extents]
            for claims in self._behind(rest, tuple(wider[:4]) or (ZERO,)):
                order = (*least, *claims)
                if len(order) < length:
                    best, length = set(), len(order)
                if len(order) == length:
                    best.add(order)
            if length == 0:
                break
        return frozenset(best)
