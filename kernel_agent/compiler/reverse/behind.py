"""`behind`: a proof that one store of a program begins behind all that another one reaches, as a tail that is filled
with zeros begins where the tiles of a loop end."""

from __future__ import annotations

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, quotient_of
from kernel_agent.compiler.schedule.polynomial import ONE, ceiling
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op


def behind(forms: Forms, later: Site, earlier: Site, changing: frozenset[Atom]) -> bool:
    """Whether the smallest offset of one store is larger than the largest of another, in the same program.

    `changing`: indices that are not the same for all that a program does. Masks are not asked: tiles count as whole.
    """
    end = _end(forms, earlier, changing)
    if end is None:
        return False
    first = forms.of(later.op.offset)
    for atom, factor in first.terms:
        if atom in changing:
            if atom.kind is Kind.OPAQUE or not factor.surely(0):
                return False
            first = first - Form.of({atom: factor})
    return (first - end).not_negative


def _end(forms: Forms, site: Site, changing: frozenset[Atom]) -> Form | None:
    """One more than the largest offset of a store, as a form of the program; None where that is not known."""
    trips = {forms.trip(loop): loop for loop in site.loops if loop.code is Code.FOR}
    end = forms.of(site.op.offset) + Form(base=ONE)
    for atom, factor in end.terms:
        if atom not in changing:
            continue
        if atom.kind is Kind.LANE and atom.extent is not None:
            count: Form | None = Form(base=atom.extent)
        else:
            count = _trips(forms, trips[atom]) if atom in trips else None
        if count is None or not factor.surely(0):
            return None
        end = end + (count - Form(base=ONE)).times(factor) - Form.of({atom: factor})
    return end


def _trips(forms: Forms, loop: Op) -> Form | None:
    """How many trips a loop makes, if it makes any; None where that is no quotient of numbers that are not negative."""
    start, stop, step = (forms.of(value) for value in loop.operands[:3])
    if step.invariant is None or not step.base.surely(1):
        return None
    span = stop - start
    if span.invariant is not None:
        return Form(base=ceiling(span.base, step.base))
    whole = span + Form(base=step.base - ONE)
    exact = whole.over(step.base)
    if exact is not None:
        return exact
    return Form.of({quotient_of(whole, step.base): ONE}) if whole.not_negative else None
