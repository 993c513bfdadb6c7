"""`Regrid`: an axis of the grid whose digits have other sizes than in the forward.

Where programs count images, and rows and columns of patches in each, the patches of elements may be more than those of
outputs: the axis is as long as all digits ask for then, and each is taken from it by its new place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.claims import Claim
from kernel_agent.compiler.schedule.counted import Span, span_of
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.materialize import Materializer
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial, ceiling
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Value


@dataclass(frozen=True)
class Part:
    """A digit of the axis."""

    low: Polynomial
    """What it counted by in the forward."""
    high: Polynomial | None
    """And the digit above it; None of the highest."""
    size: Polynomial
    """It is less than this now."""
    moved: bool
    """Whether it counts elements now."""


@dataclass(frozen=True)
class Regrid:
    """An axis of the grid."""

    axis: int
    parts: tuple[Part, ...]
    """From the lowest."""
    claims: tuple[Claim, ...]
    """Under which the forward's programs had all numbers that the digits have."""

    @property
    def extent(self) -> Polynomial:
        """Programs along it now."""
        return reduce(Polynomial.__mul__, (part.size for part in self.parts), ONE)

    @classmethod
    def of(cls, axis: int, programs: Polynomial, sizes: Mapping[Atom, Polynomial]) -> Regrid | None:
        """`programs` that the forward had along it; `sizes`: of the digits that count elements now. None where these
        are not digits of the axis, each of another place."""
        whole = Form.of({Atom(Kind.PROGRAM, axis): ONE})
        counts = [(span, size) for atom, size in sizes.items() if (span := span_of(atom)) is not None]
        if len(counts) < len(sizes) or any(span.whole != whole for span, _ in counts):
            return None
        parts: list[Part] = []
        low: Polynomial | None = ONE
        claims: list[Claim] = []
        while low is not None:
            here = [(span, size) for span, size in counts if span.low == low]
            if len(here) == 1:
                ((span, size),) = here
                counts.remove((span, size))
                parts.append(Part(low, span.high, size, moved=True))
                low = span.high
                continue
            above = _next(counts, low)
            if here or (counts and above is None):
                return None
            if above is None:
                size = ceiling(programs, low)
                claims.append(Claim(programs, low * size))
            else:
                between = above.quotient(low)
                if between is None:
                    return None
                size = between
            parts.append(Part(low, above, size, moved=False))
            low = above
        return None if counts else cls(axis, tuple(parts), tuple(claims))

    def has(self, atom: Atom) -> bool:
        """Whether an index is one of the digits."""
        span = span_of(atom)
        return span is not None and any((part.low, part.high) == (span.low, span.high) for part in self.parts)

    def digit(self, b: Builder, write: Materializer, atom: Atom) -> Value:
        """One of the digits."""
        span = span_of(atom)
        assert span is not None
        places = [place for place, part in enumerate(self.parts) if (part.low, part.high) == (span.low, span.high)]
        return self._digit(b, write, places[0])

    def beside(self, b: Builder, write: Materializer) -> Value:
        """The forward's program that has the digits that do not count elements, and zero for the others."""
        total = b.const(0)
        for place, part in enumerate(self.parts):
            if not part.moved:
                total = b.add(total, b.mul(self._digit(b, write, place), write.number(part.low, "i32")))
        return total

    def _digit(self, b: Builder, write: Materializer, place: int) -> Value:
        low = reduce(Polynomial.__mul__, (part.size for part in self.parts[:place]), ONE)
        found = b.program_id(self.axis)
        if low != ONE:
            found = b.elementwise(Code.FLOORDIV, (found, write.number(low, "i32")))
        if place < len(self.parts) - 1:
            found = b.elementwise(Code.REM, (found, write.number(self.parts[place].size, "i32")))
        return found


def _next(counts: Sequence[tuple[Span, Polynomial]], low: Polynomial) -> Polynomial | None:
    """The lowest place of a digit above another one."""
    places = [span.low for span, _ in counts if span.low.quotient(low) is not None]
    return next((one for one in places if all(other.quotient(one) is not None for other in places)), None)


class Regridder(Materializer):
    """Takes digits of such axes from their new places."""

    def __init__(self, forms: Forms, copier: Copier, regrids: Mapping[int, Regrid]) -> None:
        super().__init__(forms, copier)
        self.regrids = regrids

    def has(self, atom: Atom) -> bool:
        """Whether an index is a digit of such an axis."""
        found = self._regrid(atom)
        return found is not None and found.has(atom)

    def atom(self, atom: Atom, shape: Sequence[int]) -> Value:
        """An index. Raises CannotDerive for the axis as a whole."""
        regrid = self._regrid(atom)
        if regrid is not None and regrid.has(atom):
            return regrid.digit(self.copier.b, self, atom)
        if atom.kind is Kind.PROGRAM and atom.number in self.regrids:
            raise CannotDerive("programs do not only count outputs")
        return super().atom(atom, shape)

    def _regrid(self, atom: Atom) -> Regrid | None:
        span = span_of(atom)
        if span is None or len(span.whole.terms) != 1 or span.whole.terms[0][0].kind is not Kind.PROGRAM:
            return None
        return self.regrids.get(span.whole.terms[0][0].number)
