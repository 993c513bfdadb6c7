"""`walked`: an addition to one element of each lane's column, as a part of those of a loop that walks the columns.

Where classes are the outer axis, as channels of an image, lanes are pixels and a loop goes from class to class. The
loss picks the logit of each pixel's label once more, so that the gradient has an addition to an element that memory
names. Here the trip whose class that is adds both. An element outside of the column, which the kernel alone can see,
makes the column's gradients NaN, as in `gather`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.gather import WRITES, Gathered, alike, limit_of, parts_of, sum_of
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.reroll import rerolled
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_constant, unspread


@dataclass(frozen=True)
class Walk:
    """An addition to one element of a column, and that of a loop to all of them."""

    single: Op
    place: Value
    """Of the element in its column."""
    length: Value
    """Of a column."""
    loop: Op
    row: Op


def walked(found: Gathered, launch: Launch) -> Gathered:
    """The kernel with as many additions to single elements as possible made part of those of a loop."""
    while True:
        kernel = _joint(found.kernel, launch)
        if kernel is None:
            return found
        found = replace(found, kernel=kernel)


def _joint(kernel: Kernel, launch: Launch) -> Kernel | None:
    """The kernel with one addition less; None where there is none of these."""
    forms = Forms(kernel, launch)
    written: dict[Value, list[Site]] = {}
    for site in sites(kernel.body, WRITES):
        written.setdefault(site.op.base, []).append(site)
    for added in written.values():
        rows = [site for site in added if site.loops]
        named = [site for site in added if not site.loops]
        if not rows or not named or any(site.op.code is not Code.ATOMIC_ADD or site.branches for site in added):
            continue
        if len(rows) > 1:
            single_steps = _rerolled(kernel, rows, launch)
            found = None if single_steps is None else _joint(single_steps, launch)
        else:
            walk = next(filter(None, (_walk(forms, single, rows[0]) for single in named)), None)
            found = None if walk is None else prune(_Walker(kernel, walk).copy())
        if found is not None:
            return found
    return None


def _rerolled(kernel: Kernel, rows: Sequence[Site], launch: Launch) -> Kernel | None:
    """The kernel with one addition for those of a loop's trip; None where they are not alike."""
    with suppress(CannotDerive):
        if all(row.loops == rows[0].loops for row in rows) and len(rows[0].loops) == 1:
            return rerolled(kernel, rows[0].loops[0], launch)
    return None


def _walk(forms: Forms, single: Site, row: Site) -> Walk | None:
    """One, if the loop's addition reaches every element of a column wherever the single one is made."""
    if len(row.loops) != 1 or row.loops[0].code is not Code.FOR or row.conditions != single.conditions:
        return None
    (loop,) = row.loops
    start, stop, step = loop.operands[:3]
    if not is_constant(start, 0) or not is_constant(step, 1):
        return None
    index, last = forms.of(loop.blocks[0].arguments[0]), forms.of(stop)
    place = _place(forms, single, row, index)
    known = [] if single.op.mask is None else conjuncts(single.op.mask)
    for part in [] if row.op.mask is None else conjuncts(row.op.mask):
        end = limit_of(forms, part, index)
        if part not in known and (end is None or forms.of(end) != last):
            return None  # it may leave out a lane that the single addition does not
    return None if place is None else Walk(single.op, place, stop, loop, row.op)


def _place(forms: Forms, single: Site, row: Site, index: Form) -> Value | None:
    """Where in its column an element lies, if the addresses of both are products with one stride beside what they have
    in common, that of the loop with its index."""
    if single.op.offset.shape != row.op.offset.shape or not single.op.offset.shape:
        return None
    mine, theirs = parts_of(single.op.offset), parts_of(row.op.offset)
    for part in list(mine):
        if part in theirs:
            mine.remove(part)
            theirs.remove(part)
    if len(mine) != 1:
        return None
    place, stride = _product(forms, mine[0])
    return place if sum_of(forms, theirs) == index.times(stride) else None


def _product(forms: Forms, value: Value) -> tuple[Value, Polynomial]:
    """A number of each lane, and what it is multiplied with."""
    op = unspread(value).producer
    if op is not None and op.code is Code.MUL:
        for one, other in (op.operands, op.operands[::-1]):
            times = forms.of(other).invariant
            if times is not None and forms.of(one).invariant is None:
                return one, times
    return value, ONE


class _Walker(Copier):
    """Makes them one."""

    def __init__(self, source: Kernel, walk: Walk) -> None:
        super().__init__(source)
        self.walk = walk
        self.found: list[Value] = []
        """Where in its column the element of each lane is, what it gets, and what all others do: zero or NaN."""

    def loop(self, op: Op) -> None:
        """The one that walks."""
        if not self.slicing and op is self.walk.loop:
            self.found = self._single()
        super().loop(op)

    def effect(self, op: Op) -> None:
        """Additions."""
        walk = self.walk
        if self.slicing or op not in (walk.single, walk.row):
            super().effect(op)
        elif op is walk.row:
            b = self.b
            place, value, others = self.found
            index = self[walk.loop.blocks[0].arguments[0]]
            own = b.select(b.compare("eq", place, b.cast(index, "i64")), value, others)
            own = b.cast(own, op.stored.element)
            mask = None if op.mask is None else self[op.mask]
            self.b.store(self[op.base], self.whole(op.offset), b.add(self.whole(op.stored), own), mask, op.code)

    def _single(self) -> list[Value]:
        """What `found` holds."""
        b, op = self.b, self.walk.single
        shape = op.offset.shape
        place, length = alike(self, [b.cast(self[self.walk.place], "i64"), self[self.walk.length]])
        value = self.whole(op.stored)
        zero = b.zero(value)
        outside = b.elementwise(Code.OR, (b.compare("lt", place, b.const(0, "i64")), b.compare("ge", place, length)))
        if op.mask is not None:
            value = b.select(self[op.mask], value, zero)
            outside = b.logical_and(self[op.mask], outside)
        return [b.whole(place, shape), value, b.select(outside, b.const(math.nan, value.element), zero)]
