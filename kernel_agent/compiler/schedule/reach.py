"""`Axis`: which elements the taps of a window reach along one digit of an output's number.

A tap has y = m o + t for output o, or y = t - m o where it is mirrored, as in the border of a reflected image. That a
mirrored tap stays within the elements may depend on the launch: a border is narrower than its image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.claims import Claim
from kernel_agent.compiler.schedule.counted import Counted, Digits
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial


@dataclass(frozen=True)
class Moves:
    """What one tap does to a digit: y = sign * step * digit + shift."""

    shift: Form
    """Of the indices of loops."""
    sign: int
    """1, or -1 where the tap is mirrored."""
    conditions: tuple[Form, ...]
    """Not negative where the tap takes part."""


@dataclass(frozen=True)
class Axis:
    """How a digit becomes a coordinate of elements: y = sign * step * digit + shift, with low <= y < high."""

    step: Polynomial
    unit: Polynomial
    """Elements of memory that y counts by."""
    low: Polynomial
    high: Polynomial
    shifts: tuple[Form, ...]
    """By tap, of the indices of loops; all zero where taps do not move the digit."""
    signs: tuple[int, ...]
    """By tap, 1 or -1."""
    claims: tuple[tuple[Claim, ...], ...]
    """By tap, what says that it reaches nothing beyond."""

    @property
    def moves(self) -> bool:
        """Whether taps differ."""
        return len(set(self.shifts)) > 1 or bool(self.shifts[0].terms) or -1 in self.signs

    @classmethod
    def still(cls, unit: Polynomial, size: Polynomial, taps: int) -> Axis:
        """Of a digit that no tap moves."""
        return cls(ONE, unit, ZERO, size, (Form(),) * taps, (1,) * taps, ((),) * taps)

    @classmethod
    def of(
        cls,
        number: Counted,
        place: int,
        size: Polynomial,
        step: Polynomial,
        unit: Polynomial,
        taps: Sequence[Moves],
        calls: Calls,
    ) -> Axis:
        """Of a digit that is less than `size`. Raises CannotDerive where it is not known how far taps reach."""
        shifts, signs = tuple(tap.shift for tap in taps), tuple(tap.sign for tap in taps)
        asked = [[_asked(number, place, step, tap, below) for below in (True, False)] for tap in taps]
        lows, highs = [one for one, _ in asked], [other for _, other in asked]
        if -1 in signs:
            reach = step * (size - ONE)
            own = [_own(tap, reach) for tap in taps]
            low, from_below = _mirrored(lows, [least for least, _ in own], 1, calls)
            high, from_above = _mirrored(highs, [most for _, most in own], -1, calls)
            claims = tuple((*one, *other) for one, other in zip(from_below, from_above, strict=True))
            return cls(step, unit, low, high, shifts, signs, claims)
        reach = step * (size - ONE) + ONE
        plain = [shift.base if not shift.terms else None for shift in shifts]
        common_low = _common([next(iter(some), None) for some in lows], plain, -1)
        beyond = [None if base is None else reach + base for base in plain]
        common_high = _common([next(iter(some), None) for some in highs], beyond, 1)
        low = common_low if common_low is not None else _least(shifts)
        high = common_high if common_high is not None else reach + _most(shifts)
        return cls(step, unit, low, high, shifts, signs, ((),) * len(taps))


def impossible(tap: Sequence[Form], claims: Sequence[Claim]) -> bool:
    """Whether what a tap asks for contradicts what has to hold: then no output has it."""
    falling = [form.base for form in tap if form.times(Polynomial.integer(-1)).rises]
    known = [claim.left - claim.right for claim in claims]
    return any((-most - ONE - least).surely(0) for most in falling for least in known)


def _asked(number: Counted, place: int, step: Polynomial, tap: Moves, below: bool) -> list[Polynomial]:
    """Limits of y alone that a tap asks for: from below, or what y is less than."""
    found = []
    signed = Polynomial.integer(1 if below else -1)
    for form in tap.conditions:
        digits = number.digits(form)
        if digits is not None and _asks(digits, place, step * Polynomial.integer(tap.sign), tap.shift, signed):
            rest = digits.rest.base
            found.append(tap.shift.base - rest if below else rest + tap.shift.base + ONE)
    return found


def _asks(digits: Digits, place: int, step: Polynomial, shift: Form, signed: Polynomial) -> bool:
    """Whether a condition is a limit of y alone, from below or, with -1, from above."""
    return digits.parts == {place: step * signed} and digits.rest.terms == shift.times(signed).terms


def _own(tap: Moves, reach: Polynomial) -> tuple[Polynomial | None, Polynomial | None]:
    """What a tap reaches by the number of outputs alone: the least y, and what all are less than."""
    base = tap.shift.base
    if tap.shift.terms:
        return None, None
    return (base, base + reach + ONE) if tap.sign > 0 else (base - reach, base + ONE)


def _mirrored(
    asked: Sequence[Sequence[Polynomial]], own: Sequence[Polynomial | None], sign: int, calls: Calls
) -> tuple[Polynomial, list[tuple[Claim, ...]]]:
    """A limit that some tap asks for and all keep, and by tap what says so. `sign`: 1 for limits from below."""
    best: tuple[Polynomial, list[tuple[Claim, ...]]] | None = None
    for limit in dict.fromkeys(one for some in asked for one in some):
        claims: list[tuple[Claim, ...]] = []
        for some, reach in zip(asked, own, strict=True):
            known = [*some, *([] if reach is None else [reach])]
            found = _kept(limit, known, sign, calls)
            if found is None:
                break
            claims.append(found)
        if len(claims) == len(asked) and (best is None or sum(map(len, claims)) < sum(map(len, best[1]))):
            best = limit, claims
    if best is None:
        raise CannotDerive("how far mirrored taps reach is not known")
    return best


def _kept(limit: Polynomial, known: Sequence[Polynomial], sign: int, calls: Calls) -> tuple[Claim, ...] | None:
    """What says that one of the limits known is within another; None where nothing does."""
    claims = [Claim(one, limit) if sign > 0 else Claim(limit, one) for one in known]
    if any(claim.proved for claim in claims):
        return ()
    for claim in (one.reduced for one in claims):
        if claim.printable and not claim.refuted and not calls.refute([claim.text()]):
            return (claim,)
    return None


def _common(asked: Sequence[Polynomial | None], own: Sequence[Polynomial | None], sign: int) -> Polynomial | None:
    """The limit that some masks ask for and all taps keep: the others by themselves, which reach `own`; from above, or
    with -1 from below."""
    limits = {one for one in asked if one is not None}
    if len(limits) != 1:
        return None
    (limit,) = limits
    signed = Polynomial.integer(sign)
    kept = [reach is not None and ((limit - reach) * signed).surely(0) for reach in own]
    return limit if all(one is not None or inside for one, inside in zip(asked, kept, strict=True)) else None


def _least(shifts: Sequence[Form]) -> Polynomial:
    """No shift is less."""
    found = []
    for shift in shifts:
        if any(not number.surely(0) or atom.kind is Kind.OPAQUE for atom, number in shift.terms):
            raise CannotDerive("how far taps reach is not known")
        found.append(shift.base)
    least = next((one for one in found if all((other - one).surely(0) for other in found)), None)
    if least is None:
        raise CannotDerive("how far taps reach is not known")
    return least


def _most(shifts: Sequence[Form]) -> Polynomial:
    """No shift is more."""
    found = []
    for shift in shifts:
        reach = shift.base
        for atom, number in shift.terms:
            if atom.extent is None or not number.surely(0):
                raise CannotDerive("how far taps reach is not known")
            reach = reach + number * (atom.extent - ONE)
        found.append(reach)
    most = next((one for one in found if all((one - other).surely(0) for other in found)), None)
    if most is None:
        raise CannotDerive("how far taps reach is not known")
    return most
