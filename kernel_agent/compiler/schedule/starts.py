"""`Starts`: what of an address says in which row of a tensor it lies, where memory, programs or trips tell the row.

Of row * width + place a row's start is what is a multiple of the width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Kind
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Value

LEAST = 16
"""Elements of a row, where their number is known: counts of shorter ones are as large as what they spare."""
STRIDES = 2
"""Of an address that may have to be multiples of the width."""


@dataclass(frozen=True)
class Starts:
    """What of an address says where its row starts: what is multiplied with a multiple of the width."""

    width: Polynomial
    """Elements from one row to the next."""
    multiples: frozenset[Polynomial] = frozenset()
    """Numbers that are taken for multiples."""
    within: bool = False
    """Rows are told by the elements in them: no two additions may have elements of one."""

    @property
    def facts(self) -> list[str]:
        """By which they are."""
        return sorted(f"{one.text()} % {self.width.text()} == 0" for one in self.multiples)

    def has(self, number: Polynomial) -> bool:
        """Whether it says which row an address lies in: a multiple of the width does."""
        return self.within or number in self.multiples or number.quotient(self.width) is not None


def ways(forms: Forms, site: Site) -> Iterator[Starts]:
    """By what all that memory says is a multiple of, the longest first; then with strides that must be multiples. Rows
    that no call had longer than a few elements come last, behind longer ones that have one element stored each."""
    terms = forms.of(site.op.offset).terms
    told = [number for atom, number in terms if atom.kind is Kind.OPAQUE]
    found = {-number if all(count < 0 for _, count in number.terms) else number for _, number in terms}
    known = [one for one in found if one.printable and (one.number is None or one.number >= LEAST)]
    whole = [one for one in known if told and all(number.quotient(one) is not None for number in told)]
    widths = sorted(whole, key=_longest)
    short = [one for one in widths if _is_short(forms, one)]
    yield from _strided(terms, [one for one in widths if one not in short])
    for width in sorted(known, key=_longest) if told else ():
        if width not in whole and not _is_short(forms, width):
            yield Starts(width, within=True)
    yield from _strided(terms, short)


def _longest(width: Polynomial) -> tuple[int, str]:
    """Orders widths, the longest first."""
    return -len(width.symbols), width.text()


def _is_short(forms: Forms, width: Polynomial) -> bool:
    """Whether rows of a width had a few elements at most in all calls that were seen."""
    most = forms.launch.calls.most(width.text())
    return most is not None and most < LEAST


def _strided(terms: Sequence[tuple[Atom, Polynomial]], widths: Sequence[Polynomial]) -> Iterator[Starts]:
    """By widths, with as many strides as there may be that must be multiples."""
    for most in range(STRIDES + 1):
        for width in widths:
            others = {number for _, number in terms if number.quotient(width) is None and number.printable}
            strides = sorted((one for one in others if one.number is None), key=Polynomial.text)
            for chosen in combinations(strides, most):
                yield Starts(width, frozenset(chosen))


class Start:
    """Takes an address apart: where its row starts, and the place within the row."""

    def __init__(self, copier: Copier, forms: Forms, starts: Starts) -> None:
        self.copier = copier
        self.forms = forms
        self.starts = starts
        self.beside = Polynomial()
        """What is always added to where the row starts."""

    def of(self, value: Value, factor: Polynomial) -> Value | None:
        """The part of a value, which the address has `factor` times, that says where its row starts; None where it has
        none. Raises CannotDerive where it cannot be taken apart."""
        return self._part(value, factor, first=True)

    def place(self, value: Value, factor: Polynomial) -> Value | None:
        """The other part."""
        return self._part(value, factor, first=False)

    def _part(self, value: Value, factor: Polynomial, *, first: bool) -> Value | None:
        form = self.forms.of(value).times(factor)
        starts = [self.starts.has(number) for _, number in form.terms]
        if all(starts) and (self.starts.within or form.base.quotient(self.starts.width) is not None):
            return self.copier[value] if first and (form.terms or form.base.terms) else None
        if not any(starts):
            self.beside = self.beside + form.base if first else self.beside
            return None if first else self.copier[value]
        return self._inside(value, factor, first=first)

    def _inside(self, value: Value, factor: Polynomial, *, first: bool) -> Value | None:
        """Of a value that has both parts."""
        b, op = self.copier.b, value.producer
        if op is not None and op.code in (Code.ADD, Code.SUB):
            left, right = (self._part(operand, factor, first=first) for operand in op.operands)
            if left is None or right is None:
                return left if right is None else right if op.code is Code.ADD else b.neg(right)
            return b.add(left, right) if op.code is Code.ADD else b.sub(left, right)
        if op is not None and op.code is Code.MUL:
            for one, other in (op.operands, op.operands[::-1]):
                times = self.forms.of(other).invariant
                if times is not None:
                    inner = self._part(one, factor * times, first=first)
                    return None if inner is None else b.mul(inner, self.copier[other])
        if op is not None and op.code in (Code.CAST, Code.EXPAND):
            inner = self._part(op.operands[0], factor, first=first)
            if inner is None:
                return None
            return b.cast(inner, value.element) if op.code is Code.CAST else b.expand(inner, op.attributes["axis"])
        raise CannotDerive("an address is no sum of where its row starts and of a place within")
