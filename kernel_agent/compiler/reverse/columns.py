"""`columns_apart`: a proof that two stores of a program have columns of their own, whatever rows they are in.

An offset is a multiple of a stride, the row, and what is added to that, the column. Columns that differ, and by less
than the stride, make different offsets in any two rows. So a column may be made of several indices that are no digits
of one number, as `6 (j // 3) + j % 3` beside a row's first three elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial, ceiling
from kernel_agent.compiler.schedule.sites import Bound


@dataclass(frozen=True)
class Offsets:
    """Of one store, for one program."""

    form: Form
    bounds: tuple[Bound, ...]
    """What holds where it takes part."""


@dataclass(frozen=True)
class _Range:
    """The columns from `low` to `high`, both included."""

    low: Polynomial
    high: Polynomial


def columns_apart(one: Offsets, other: Offsets) -> bool:
    """Whether no offset of one store is one of the other."""
    strides = {factor for offsets in (one, other) for _, factor in offsets.form.terms}
    return any(_apart(_columns(one, stride), _columns(other, stride), stride) for stride in strides)


def _apart(one: _Range | None, other: _Range | None, stride: Polynomial) -> bool:
    """Whether two ranges are apart, and together no wider than a stride."""
    if one is None or other is None:
        return False
    if not ((other.low - one.high).surely(1) or (one.low - other.high).surely(1)):
        return False
    return (stride - (other.high - one.low)).surely(1) and (stride - (one.high - other.low)).surely(1)


def _columns(offsets: Offsets, stride: Polynomial) -> _Range | None:
    """What is added to multiples of a stride; None where that is not known."""
    low = high = offsets.form.base
    for atom, factor in offsets.form.terms:
        if factor.quotient(stride) is not None:
            continue
        extent = _extent(atom, offsets.bounds)
        if extent is None or atom.kind is Kind.OPAQUE or not factor.surely(0):
            return None
        high = high + factor * (extent - ONE)
    return _Range(low, high)


def _extent(atom: Atom, bounds: Iterable[Bound]) -> Polynomial | None:
    """What an index is less than: the least of what is known, if that can be told."""
    found = [atom.extent] if atom.extent is not None else []
    for bound in bounds:
        if bound.form == Form.of({atom: ONE}):
            found.append(bound.below)
        elif atom.kind is Kind.QUOTIENT and atom.divisor is not None and bound.form == atom.whole:
            found.append(ceiling(bound.below, atom.divisor))
    least = next((one for one in found if all((other - one).surely(0) for other in found)), None)
    return least if least is not None or not found else found[-1]
