"""`with_columns`: what the trips of a loop add to one column of a tile each, as part of what is added to the tile.

A kernel may read a tile of logits for their log-sum-exp, and then one tap's column after the other: the gradient has an
addition in every trip, and one to the whole tile behind the loop, which no two stores could be. Here the loop keeps the
tile, the lanes of a column take what its trip adds, and the tile is added to once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.schedule.claims import Claim, Claims, open_claims
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.gather import WRITES, Gathered
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Site, loop_forms, mask_forms, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Op, Value, is_constant

MOST = 64
"""Columns that are looked at in every trip."""


@dataclass(frozen=True)
class Column:
    """An addition in a loop, and the one behind it that has all columns."""

    loop: Op
    part: Op
    tile: Op
    axis: int
    """Of the tile, along which trips are lanes."""
    claims: Claims
    """Under which every trip has a lane."""


def with_columns(found: Gathered, launch: Launch) -> Gathered:
    """The kernel with as many additions to columns as possible made part of those to tiles."""
    while True:
        column = _column(found, launch)
        if column is None:
            return found
        kernel = prune(_Columns(found, column).copy())
        found = replace(found, kernel=kernel, claims=(*found.claims, *column.claims))


def _column(found: Gathered, launch: Launch) -> Column | None:
    """The first pair of additions that can be one; None where there is none."""
    forms = Forms(found.kernel, launch)
    written: dict[Value, list[Site]] = {}
    for site in sites(found.kernel.body, WRITES):
        written.setdefault(site.op.base, []).append(site)
    for added in written.values():
        if len(added) == 2 and all(site.op.code is Code.ATOMIC_ADD and not site.branches for site in added):
            pair = _pair(forms, *added)
            if pair is not None:
                return pair
    return None


def _pair(forms: Forms, part: Site, tile: Site) -> Column | None:
    """Of additions in the order of the kernel."""
    if len(part.loops) != 1 or tile.loops or part.conditions != tile.conditions:
        return None  # a program may end between the two
    (loop,), rank = part.loops, len(tile.op.offset.shape)
    if loop.code is not Code.FOR or part.block not in loop.blocks or rank != len(part.op.offset.shape) + 1:
        return None
    start, _, step = loop.operands[:3]
    trip = forms.trip(loop)
    if not is_constant(start, 0) or not is_constant(step, 1) or trip.extent is None:
        return None
    for axis in range(rank):
        size = _columns(forms, part, tile, trip, axis)
        claims = None if size is None else open_claims([Claim(size, trip.extent)])
        if claims is None or forms.launch.calls.refute(claim.text() for claim in claims):
            continue
        if _is_within(forms, part, tile, loop, axis):
            return Column(loop, part.op, tile.op, axis, claims)
    return None


def _columns(forms: Forms, part: Site, tile: Site, trip: Atom, axis: int) -> Polynomial | None:
    """How many columns a tile has along an axis, if a trip's elements are those of the lane with its number; None where
    they are others, or too many."""
    distance = forms.of(tile.op.offset) - _beside(forms.of(part.op.offset), axis)
    lane = next((atom for atom, _ in distance.terms if atom.kind is Kind.LANE), None)
    if lane is None or lane.number != axis or distance != Form.of({lane: ONE, trip: -ONE}):
        return None
    symbol = forms.kernel.extents.get(tile.op.offset.shape[axis], "")
    most = forms.launch.calls.most(symbol) if symbol else None
    return lane.extent if max(tile.op.offset.shape[axis], most or 0) <= MOST else None


def _is_within(forms: Forms, part: Site, tile: Site, loop: Op, axis: int) -> bool:
    """Whether the tile's mask holds, in the lanes of a trip's column, wherever the column's does."""
    known = loop_forms(forms, loop)
    own = [] if part.op.mask is None else mask_forms(forms, part.op.mask)
    known += [_beside(form, axis) for form in own if form is not None]
    asked = [] if tile.op.mask is None else mask_forms(forms, tile.op.mask)
    return all(form is not None and _in_column(form, axis, forms.trip(loop)) in known for form in asked)


def _beside(form: Form, axis: int) -> Form:
    """A form as seen from a tile with one more axis."""
    return form.moved(lambda old: old + (old >= axis))


def _in_column(form: Form, axis: int, trip: Atom) -> Form:
    """A form in the lanes of a trip's column, those of quotients and the like excepted."""
    found = form.coefficients
    lane = next((atom for atom in found if atom.kind is Kind.LANE and atom.number == axis), None)
    if lane is not None and trip not in found:
        found[trip] = found.pop(lane)
    return Form.of(found, form.base)


class _Columns(Copier):
    """Makes the two one."""

    def __init__(self, source: Gathered, column: Column) -> None:
        super().__init__(source.kernel)
        self.column = column
        self.total: Value | None = None
        """What columns got so far."""

    def loop(self, op: Op) -> None:
        """A FOR."""
        if self.slicing or op is not self.column.loop:
            super().loop(op)
            return
        b, (block,), tile = self.b, op.blocks, self.column.tile
        zeros = b.whole(b.const(0.0, tile.stored.element), tile.offset.shape)
        carries = [*(self.whole(value) for value in op.operands[3:]), zeros]

        def body(index: Value, inner: list[Value]) -> Sequence[Value]:
            self.enter(block.arguments, (index, *inner[:-1]))
            self.total = inner[-1]
            yields = self.block(block)
            return [*yields, self.total]

        names = [*(value.name for value in block.arguments[1:]), f"{tile.base.name}_tile"]
        start, stop, step = self.all(op.operands[:3])
        name = block.arguments[0].name
        *own, self.total = b.loop((start, stop, step), carries, body, index_name=name, names=names, **op.attributes)
        self.results(op, own)

    def effect(self, op: Op) -> None:
        """Additions."""
        b, column = self.b, self.column
        if self.slicing or op not in (column.part, column.tile) or self.total is None:
            super().effect(op)
        elif op is column.part:
            value = b.whole(self[op.stored], op.offset.shape)
            value = value if op.mask is None else b.select(self[op.mask], value, b.zero(value))
            self.total = b.add(self.total, self._placed(b.cast(value, column.tile.stored.element)))
        else:
            mask = None if op.mask is None else self[op.mask]
            total = b.add(self.whole(op.stored), self.total)
            b.store(self[op.base], self.whole(op.offset), total, mask, op.code)

    def _placed(self, value: Value) -> Value:
        """The value in the lanes of the trip's column, zero in the others."""
        b, axis, shape = self.b, self.column.axis, self.column.tile.offset.shape
        lanes = b.arange(0, shape[axis], self.source.extents.get(shape[axis]))
        for other in range(len(shape)):
            lanes = lanes if other == axis else b.expand(lanes, other)
        hit = b.compare("eq", lanes, self[self.column.loop.blocks[0].arguments[0]])
        spread = b.whole(b.expand(value, axis), shape)
        return b.select(b.whole(hit, shape), spread, b.zero(spread))
