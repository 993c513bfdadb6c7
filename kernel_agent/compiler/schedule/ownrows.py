"""`with_own_rows`: additions to the rows of a program's own, turned as those of a loop to the rows of others.

Causal attention may take the tile on the diagonal before or behind its loop over the tiles ahead of it, and a loss of
pairs may add to the row of an anchor what it adds to all others in a loop. Such a gradient has places that depend on a
trip and others that depend on a program in the same way: whoever owns the rows of a trip sums over programs in a loop,
and does once what the program with that number does.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.owner import Turn, own_loops
from kernel_agent.compiler.schedule.sites import OwnRows, Site


def with_own_rows(forms: Forms, some: Sequence[Site], turns: Sequence[Turn | str]) -> tuple[Turn, list[Site]] | None:
    """The one turn of additions to a gradient, of which some are to a program's own rows; None where they have none.

    `turns`: of each addition, or why there is none.
    """
    moving = [(site, turn) for site, turn in zip(some, turns, strict=True) if own_loops(forms, site)]
    if not moving or len(moving) == len(some):
        return None
    first, turn = moving[0]
    address = forms.of(first.op.offset)
    if isinstance(turn, str) or any(other != turn or forms.of(site.op.offset) != address for site, other in moving):
        return None
    if len(turn.trips) != 1:
        return None
    trip = forms.trip(own_loops(forms, first)[0])
    found: list[Site] = []
    for site in some:
        if own_loops(forms, site):
            found.append(site)
            continue
        axis = _axis(trip, address, forms.of(site.op.offset))
        if axis not in turn.summed or site.op.offset.shape != first.op.offset.shape:
            return None
        fact = "" if _owners_do_all(forms, trip, axis) else _trips_do_all(forms, trip, axis)
        if fact is None:
            return None
        found.append(OwnRows(site.op, site.block, site.loops, site.conditions, site.sides, axis, fact))
    return turn, found


def _owners_do_all(forms: Forms, trip: Atom, axis: int) -> bool:
    """Whether as many owners as there are programs are enough for all trips, and trips behind the last one of each
    program would do nothing."""
    programs, extent = forms.launch.grid[axis], trip.extent
    if extent is None or programs == extent:
        return programs == extent
    squared = forms.loops[trip.number].operands[1].name in forms.launch.scalars
    return squared and (programs - extent).surely(0)


def _trips_do_all(forms: Forms, trip: Atom, axis: int) -> str | None:
    """The fact under which an owner for every trip is one for every program. Owners with higher numbers have no program
    whose own rows they could do. None where that is not to be had."""
    programs, extent = forms.launch.grid[axis], trip.extent
    if extent is None or not (programs.printable and extent.printable):
        return None
    fact = f"{extent.text()} >= {programs.text()}"
    return fact if forms.launch.calls.show((fact,)) else None


def _axis(trip: Atom, moving: Form, still: Form) -> int:
    """The axis of the grid whose number is in one address what a trip is in another; -1 where they differ in more."""
    number = moving.coefficients.get(trip)
    if number is None:
        return -1
    rest = still - Form.of({atom: factor for atom, factor in moving.terms if atom != trip}, moving.base)
    if rest.base.terms or len(rest.terms) != 1:
        return -1
    ((atom, factor),) = rest.terms
    return atom.number if atom.kind is Kind.PROGRAM and factor == number else -1
