"""`as_rows`: additions to single elements of a row that the forward's program loads as a whole, as one to that row.

A search loads a row and gives one element of it, or a few one after the other: their gradients are single additions,
and somebody else has to fill the rest with zeros. The program that had all of the row
before it can add to all of it: what the elements get, and zero elsewhere. That is one store, and memory that starts
empty. An element outside of the row, which the kernel alone can see, makes the row's gradients NaN (see `gather`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.claims import open_claims
from kernel_agent.compiler.schedule.coverage import Counter
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.gather import WRITES, Gathered, alike, is_whole, limit_of, parts_of, sum_of
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

MOST = 16
"""Elements of a row, one after the other, that all its lanes compare their places with."""


@dataclass(frozen=True)
class Row:
    """A row that the forward loads."""

    load: Op
    first: tuple[Value, ...]
    """What its address is the sum of, without what tells lanes apart."""
    lanes: tuple[Value, ...]
    """What the lanes' places in it are the sum of."""
    length: Value


def as_rows(found: Gathered, forward: Kernel, gradients: Mapping[str, str], launch: Launch) -> Gathered:
    """The kernel with additions to rows where it adds to single elements of these alone, as far as each element of the
    gradient is proved to be stored once then, and all of them were in the launches that were seen."""
    for tensor, name in gradients.items():
        added = [site for site in sites(found.kernel.body, WRITES) if site.op.base.name == name]
        if not added or not all(_is_single(site, found.kernel, launch) for site in added):
            continue
        forms = Forms(forward, launch)
        for site in sites(forward.body, frozenset((Code.LOAD,))):
            counter = Counter(forms)
            row = _row(counter, site) if site.op.base.name == tensor else None
            claims = None if row is None else open_claims(counter.claims)
            if row is None or claims is None or launch.calls.refute(claim.text() for claim in claims):
                continue
            try:
                kernel = prune(_Rower(found.kernel, forward, added, row).copy())
            except CannotDerive:
                continue
            whole = owned(kernel, {tensor: name}, launch).empty_if.get(name)
            if whole and launch.calls.show((whole,)):
                found = Gathered(kernel, (*found.claims, *claims))
                break
    return found


def _is_single(site: Site, kernel: Kernel, launch: Launch) -> bool:
    """Whether an addition is to one element, a few times at most."""
    if site.op.code is not Code.ATOMIC_ADD or site.op.offset.shape or site.branches or site.conditions:
        return False
    forms, times = Forms(kernel, launch), 1
    for loop in site.loops:
        extent = forms.trip(loop).extent if loop.code is Code.FOR else None
        if extent is None or not extent.printable:
            return False
        number = launch.calls.most(extent.text()) if extent.number is None else extent.number
        if number is None:
            return False
        times *= number
    return times <= MOST


def _row(counter: Counter, site: Site) -> Row | None:
    """The row that is loaded at a site; None where it is less than that."""
    if len(site.op.offset.shape) != 1 or site.loops or site.branches or site.conditions:
        return None
    parts = parts_of(site.op.offset)
    lanes = [part for part in parts if part.shape]
    place = sum_of(counter.forms, lanes)
    length = limit_of(counter.forms, site.op.mask, place)
    if length is None or not is_whole(counter, site, place):
        return None
    return Row(site.op, tuple(part for part in parts if not part.shape), tuple(lanes), length)


class _Rower(Copier):
    """Adds to the row at the end of the kernel."""

    def __init__(self, source: Kernel, forward: Kernel, added: Sequence[Site], row: Row) -> None:
        super().__init__(source)
        self.forward = Copier(forward, self.b)
        self.added = {site.op: site for site in added}
        self.row = row

    def copy(self) -> Kernel:
        """The whole kernel."""
        self.block(self.source.body)
        b, row, again = self.b, self.row, self.forward
        place = Place(tuple(again.all(row.first)), _sum(b, again.all(row.lanes)), again[row.length])
        whole, *others = self.added.values()
        total = _added(self, whole, whole.loops, place)
        for site in others:
            total = b.add(total, _added(self, site, site.loops, place))
        mask = None if row.load.mask is None else again[row.load.mask]
        b.store(self[whole.op.base], again.whole(row.load.offset), total, mask, Code.ATOMIC_ADD)
        return b.kernel

    def effect(self, op: Op) -> None:
        """The additions, which are made at the end."""
        if self.slicing or op not in self.added:
            super().effect(op)


@dataclass(frozen=True)
class Place:
    """A row in the kernel that adds to it."""

    first: tuple[Value, ...]
    """As of `Row`."""
    lanes: Value
    length: Value


def _added(copier: Copier, site: Site, loops: Sequence[Op], row: Place) -> Value:
    """What an addition, in all trips of the loops around it, adds to each lane of a row."""
    b = copier.b
    if not loops:
        return _one(copier, site, row)
    (block,) = loops[0].blocks

    def trip(index: Value, carried: list[Value]) -> list[Value]:
        inner = copier.aside()
        inner[block.arguments[0]] = index
        return [b.add(carried[0], _added(inner, site, loops[1:], row))]

    zeros = b.whole(b.const(0.0, site.op.stored.element), row.lanes.shape)
    start, stop, step = copier.all(loops[0].operands[:3])
    return b.loop((start, stop, step), [zeros], trip, index_name=block.arguments[0].name)[0]


def _one(copier: Copier, site: Site, row: Place) -> Value:
    """What one addition adds to each lane of a row. Raises CannotDerive where it is not to one of its elements."""
    b = copier.b
    mine = parts_of(copier[site.op.offset])
    for part in row.first:
        if part not in mine:
            raise CannotDerive("the address of a single element does not begin where the row does")
        mine.remove(part)
    lanes, place, length = alike(copier, [row.lanes, _sum(b, mine), row.length])
    value = copier[site.op.stored]
    inside = b.logical_and(b.compare("ge", place, b.zero(place)), b.compare("lt", place, length))
    others = b.select(inside, b.zero(value), b.const(math.nan, value.element))
    found = b.select(b.compare("eq", lanes, place), value, others)
    return found if site.op.mask is None else b.select(copier[site.op.mask], found, b.zero(value))


def _sum(b: Builder, parts: Sequence[Value]) -> Value:
    """Of integers, as wide as the widest; 0 of none."""
    element = "i64" if any(part.element == "i64" for part in parts) else "i32"
    total = b.const(0, element)
    for part in parts:
        total = b.add(total, b.cast(part, element))
    return total
