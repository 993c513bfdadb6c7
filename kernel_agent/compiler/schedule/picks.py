"""`Picks`: additions to tiles that the trips of a loop pick, as only memory says: the blocks of keys of a sparse row.

How many trips there are memory says as well. That the number of the tile is all that such an address depends on,
beside programs and lanes, shows here; who picks which tile a launch of the backward has to find (see `picklist`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.compiler.errors import DoesNotApply
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.ownership import WRITES
from kernel_agent.compiler.schedule.polynomial import Polynomial, ceiling
from kernel_agent.compiler.schedule.sites import Site, negatives, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

AXES = 3
"""Of a grid."""


@dataclass(frozen=True)
class Picks:
    """What one loop of a kernel adds to, tile by tile."""

    forms: Forms
    added: tuple[Site, ...]
    """All in the loop's own straight code."""
    loop: Op
    number: Value
    """Of the tile that a trip picks."""
    count: Polynomial
    """Tiles: of a number that is no less nothing is added to."""
    signed: bool
    """Whether something may be added to one of a number below 0, which is no tile; then the backward has to ask."""
    kept: tuple[int, ...]
    """Axes of the grid that addresses depend on."""
    summed: tuple[int, ...]
    """The others."""

    @property
    def conditions(self) -> tuple[tuple[Value, bool], ...]:
        """Under which the loop runs."""
        return self.added[0].conditions


def picks(kernel: Kernel, launch: Launch) -> Picks:
    """The additions of a kernel, all of which must be to such tiles. Raises DoesNotApply."""
    added = sites(kernel.body, WRITES)
    first = added[0]
    if any(site.op.code is not Code.ATOMIC_ADD for site in added) or any(
        site.block is not first.block for site in added
    ):
        raise DoesNotApply("what is added to is not all added to in one loop")
    if len(first.loops) != 1 or first.block not in first.loops[0].blocks or first.loops[0].code is not Code.FOR:
        raise DoesNotApply("what is added to is not added to in every trip of one loop")
    forms = Forms(kernel, launch)
    (loop,) = first.loops
    extent = forms.trip(loop).extent
    if extent is not None and extent.printable:
        raise DoesNotApply("its trips are counted before the launch")
    numbers = {_number(forms, site, loop) for site in added}
    counts = {count for site in added for count in [_count(forms, site, numbers)]}
    if len(numbers) != 1 or len(counts) != 1:
        raise DoesNotApply("its trips pick tiles of several numbers")
    sources = {
        atom.number for site in added for atom in forms.of(site.op.offset).coefficients if atom.kind is Kind.PROGRAM
    }
    axes = range(len(launch.grid))
    kept = tuple(axis for axis in axes if axis in sources)
    if len(kept) >= AXES:
        raise DoesNotApply("it would need a grid of more than three axes")
    (number,), (count,) = numbers, counts
    signed = not all(_not_negative(forms, site, number) for site in added)
    if signed and not launch.calls.typical:
        raise DoesNotApply("a later call may pick what is no tile")
    summed = tuple(axis for axis in axes if axis not in sources)
    return Picks(forms, tuple(added), loop, number, count, signed, kept, summed)


def _number(forms: Forms, site: Site, loop: Op) -> Value:
    """The number that a trip picks a tile by: all of an address that is neither program nor lane."""
    address = forms.of(site.op.offset)
    others = [atom for atom, _ in address.terms if atom.kind not in (Kind.PROGRAM, Kind.LANE)]
    if len(others) != 1 or others[0].kind is not Kind.OPAQUE:
        raise DoesNotApply("its addresses do not depend on one number that memory has")
    found = next((value for value in _results(loop) if value.id == others[0].number), None)
    if found is None or found.shape or found.element not in ("i32", "i64"):
        raise DoesNotApply("the number that its addresses depend on is not that of a tile")
    return found


def _results(loop: Op) -> Iterator[Value]:
    """Of the loop's own straight code."""
    for op in loop.blocks[0].ops:
        yield from op.results


def _count(forms: Forms, site: Site, numbers: set[Value]) -> Polynomial:
    """How many tiles there are, as the mask says: where `number * size + lane < limit`, it is less than `limit / size`,
    rounded up."""
    ids = {value.id for value in numbers}
    for negative in negatives(forms, site):
        for atom, size in negative.terms:
            rest = Form(tuple(term for term in negative.terms if term[0] is not atom))
            if atom.kind is Kind.OPAQUE and atom.number in ids and size.surely(1) and rest.rises:
                count = ceiling(-negative.base, size)
                if count.printable:
                    return count
    raise DoesNotApply("no mask says how many tiles there are")


def _not_negative(forms: Forms, site: Site, number: Value) -> bool:
    """Whether the mask says that the number of a tile is at least 0."""
    for negative in negatives(forms, site):
        if len(negative.terms) == 1:
            ((atom, factor),) = negative.terms
            mine = atom.kind is Kind.OPAQUE and atom.number == number.id
            if mine and (-factor).surely(1) and (negative.base - factor).surely(0):
                return True
    return False
