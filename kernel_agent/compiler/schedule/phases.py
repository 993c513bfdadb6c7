"""`Phase`: the loops of an owner's kernel that sum what some additions add, one phase after the other.

A loop over programs only visits those that take part, where the condition says so in terms that can be solved: of a
causal mask, those at or after the diagonal. Other conditions become branches in the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import UNKNOWN, Forms
from kernel_agent.compiler.schedule.linear import Atom, Kind
from kernel_agent.compiler.schedule.peel import Peeled, peel
from kernel_agent.compiler.schedule.sites import OwnRows, Site, mask_bounds
from kernel_agent.compiler.schedule.visited import split_conditions, visited
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

if TYPE_CHECKING:
    from kernel_agent.compiler.schedule.owner import Turn

Conditions = tuple[tuple[Value, bool], ...]


class Turned(Copier):
    """Copies slices in which programs are other programs, or indices of loops."""

    def __init__(self, source: Kernel, b: Builder, programs: dict[int, Value], counts: Mapping[int, Value]) -> None:
        super().__init__(source, b)
        self.programs = programs
        self.counts = counts

    def at(self, axis: int, program: Value) -> Turned:
        """A copier that knows what this one does, where it copies nothing of the axis yet, for one program along it."""
        found = Turned(self.source, self.b, {**self.programs, axis: program}, self.counts)
        found.learn(self)
        return found

    def pure(self, op: Op) -> None:
        """Programs and their numbers."""
        if op.code is Code.PROGRAM_ID and op.attributes["axis"] in self.programs:
            self[op.result] = self.programs[op.attributes["axis"]]
        elif op.code is Code.NUM_PROGRAMS and op.attributes["axis"] in self.counts:
            self[op.result] = self.counts[op.attributes["axis"]]
        elif op.code is Code.TAPE_LOAD:
            raise CannotDerive("it depends on what earlier trips of a loop computed")
        else:
            super().pure(op)


@dataclass(frozen=True)
class Phase:
    """Additions that are done in the same trips, under the same conditions."""

    forms: Forms
    summed: tuple[int, ...]
    """Axes that are loops now, the outermost first."""
    inner: tuple[Op, ...]
    """Loops that stay loops, within those."""
    conditions: Conditions
    sites: tuple[Site, ...]
    own: int | None = None
    """An axis of the grid along which only the program takes part that has the owner's number; None where all do."""
    index: Value | None = None
    """That number, in the owner's kernel."""
    guarded: bool = False
    """There may be no such program."""

    @property
    def moving(self) -> frozenset[Atom]:
        """Indices of the loops, and what may be one."""
        trips = [self.forms.trip(loop) for loop in self.inner]
        return frozenset([UNKNOWN, *trips, *(self.forms.program(axis) for axis in self.summed)])

    def run(self, copier: Turned, jobs: Sequence[Job], totals: Sequence[Total]) -> Value | None:
        """Write the loops. Returns whether a trip of them took part; None where one always does."""
        b = copier.b
        low, high, steady, rest = self.limits(copier)
        kept = list({id(total): total for total in totals}.values())  # jobs may have one sum
        start = [carry for total in kept for carry in total.carries]
        if rest:
            start.append(b.const(False, "i1"))
        some = None if high is None else b.compare("lt", low, high)
        if self.guarded and self.own is not None and self.index is not None:
            there = b.compare("lt", self.index, copier.counts[self.own])
            some = there if some is None else b.logical_and(some, there)
        for condition, holds in steady:
            one = copier[condition] if holds else b.elementwise(Code.XOR, (copier[condition], b.const(True, "i1")))
            some = one if some is None else b.logical_and(some, one)

        def nest(loops: list[int | Op], carries: list[Value]) -> Sequence[Value]:
            if not loops:
                return conditional(list(rest), carries)
            first, *others = loops

            def body(index: Value, inner: list[Value]) -> Sequence[Value]:
                if isinstance(first, int):
                    copier.programs[first] = index
                else:
                    copier[first.blocks[0].arguments[0]] = index
                return nest(others, inner)

            if isinstance(first, int):
                name = _name_of(copier.source, first)
                own = (low, high or copier.counts[first]) if not others else (b.const(0), copier.counts[first])
                trips = (*own, b.const(1))
                found = b.loop(trips, carries, body, index_name=name, certain=True)
                del copier.programs[first]
                return found
            bounds = (copier[first.operands[0]], copier[first.operands[1]], copier[first.operands[2]])
            return b.loop(bounds, carries, body, index_name=first.blocks[0].arguments[0].name)

        def conditional(conditions: list[tuple[Value, bool]], carries: list[Value]) -> Sequence[Value]:
            if conditions:
                (condition, holds), *others = conditions
                sides: list[Callable[[], Sequence[Value]]] = [lambda: conditional(others, carries), lambda: carries]
                return b.branch(copier[condition], *(sides if holds else sides[::-1]))
            sums: dict[int, list[Value]] = {}
            for total in kept:
                sums[id(total)], carries = carries[: total.job.width], carries[total.job.width :]
            for job, total in zip(jobs, totals, strict=True):
                sums[id(total)] = job.add(copier, sums[id(total)])
            found = [carry for total in kept for carry in sums[id(total)]]
            return [*found, b.const(True, "i1")] if rest else found

        loops: list[int | Op] = [*self.summed, *self.inner]
        if some is None:
            sums = list(nest(loops, start))
        else:  # within, the loop has a trip, and loads can leave it
            sums = list(b.branch(some, lambda: nest(loops, start), lambda: start))
        for total in kept:
            total.carries, sums = sums[: total.job.width], sums[total.job.width :]
        return sums[0] if rest else some

    def limits(self, copier: Turned) -> tuple[Value, Value | None, Conditions, Conditions]:
        """Trips that the innermost loop over programs can keep to, from `low` on and, unless None, before `high`;
        conditions that are the same in all trips, and those that are left."""
        moving = self.moving
        known = split_conditions(self.conditions)
        steady = tuple((c, holds) for c, holds in known if self.forms.reads(c).isdisjoint(moving))
        rest = tuple((c, holds) for c, holds in known if not self.forms.reads(c).isdisjoint(moving))
        low = copier.b.const(0)
        if self.inner or not self.summed:
            return low, None, steady, rest
        *_, axis = self.summed
        outer = moving - {self.forms.program(axis)}
        asked = tuple((c, holds) for c, holds in rest if self.forms.reads(c).isdisjoint(outer))
        found, left = visited(self.forms, copier, axis, asked)
        if found is None:
            return low, None, steady, rest
        left = tuple(one for one in rest if one not in asked or one in left)
        return found.low or low, found.high or copier.counts[axis], steady, left


def phases(forms: Forms, turn: Turn, added: Sequence[Site]) -> list[Phase]:
    """In the order of the source."""
    together: dict[tuple[tuple[Op, ...], Conditions, tuple[Op, ...], int | None, bool], list[Site]] = {}
    for site in added:
        sources = forms.of(site.op.offset).sources
        inner = tuple(loop for loop in site.loops if forms.trip(loop) not in sources)
        own, fact = (site.axis, site.fact) if isinstance(site, OwnRows) else (None, "")
        together.setdefault((inner, site.conditions, site.loops, own, bool(fact)), []).append(site)
    return [
        Phase(
            forms,
            tuple(axis for axis in turn.summed if axis != own),
            inner,
            conditions,
            tuple(found),
            own,
            guarded=guarded,
        )
        for (inner, conditions, _, own, guarded), found in together.items()
    ]


def _name_of(kernel: Kernel, axis: int) -> str:
    """What the source calls the number of a program."""
    for op in kernel.ops:
        if op.code is Code.PROGRAM_ID and op.attributes["axis"] == axis and op.result.name:
            return op.result.name
    tile = tile_of(kernel, axis)
    return f"block_{tile}" if tile else f"program_{axis}"


def tile_of(kernel: Kernel, axis: int) -> str:
    """`m` where programs along an axis each have a tile of BLOCK_M; empty where that is not so."""
    found = set()
    for op in kernel.ops:
        for one, other in (op.operands, op.operands[::-1]) if op.code is Code.MUL else ():
            number, size = one.producer, other.producer
            if number is not None and number.code is Code.CAST:
                number = number.operands[0].producer
            if number is None or number.code is not Code.PROGRAM_ID or number.attributes["axis"] != axis:
                continue
            symbol = size.attributes.get("symbol") if size is not None and size.code is Code.CONST else None
            found.add(symbol or "")
    match = re.fullmatch(r"BLOCK_([A-Z]+)", next(iter(found))) if len(found) == 1 else None
    return match[1].lower() if match else ""


@dataclass(frozen=True)
class Job:
    """One addition."""

    op: Op
    peeled: Peeled
    """What is done to the sum rather than to what is summed."""
    mask_moves: bool
    """The mask changes from trip to trip."""
    placed: bool
    """The mask alone says which indices of the new grid have a place in the tensor."""
    still: tuple[Value, ...] = ()
    """Conditions of a mask that moves that are the same in all trips."""

    @classmethod
    def of(cls, forms: Forms, op: Op, moving: frozenset[Atom], conditions: Conditions) -> Job:
        """`moving`: indices of the loops that sum; `conditions`: what the addition is under. One that is the same in
        all trips may say which programs have a place there, too."""
        moves = op.mask is not None and not forms.reads(op.mask).isdisjoint(moving)
        still = Peeled(op.stored) if moves else peel(forms, op.stored, moving)
        limits = [] if op.mask is None or moves else mask_bounds(forms, op.mask)
        trips = [atom for atom in forms.of(op.offset).sources if atom.kind is Kind.TRIP]
        placed = all(any(atom in bound.form.sources for bound in limits) for atom in trips)
        steady = any(forms.reads(condition).isdisjoint(moving) for condition, _ in split_conditions(conditions))
        parts = conjuncts(op.mask) if moves and op.mask is not None else []
        kept = tuple(part for part in parts if forms.reads(part).isdisjoint(moving))
        return cls(op, still, moves, bool(trips) and placed and not steady, kept)

    def key(self, copier: Copier) -> Hashable:
        """Equal of jobs whose sums can be one."""
        if self.mask_moves:
            still = tuple(copier[part] for part in self.still)
            return (self.op.base, copier.whole(self.op.offset), still, self.op.offset.shape)
        op, inner, layers = self.op, self.peeled.value, []
        for layer in reversed(self.peeled.layers):
            factors = tuple(copier[operand] for operand in layer.operands if operand is not inner)
            layers.append((layer.code, factors, layer.attributes.get("order")))
            inner = layer.result
        mask = None if op.mask is None else copier[op.mask]
        return (op.base, copier.whole(op.offset), mask, tuple(layers), self.peeled.value.shape)

    @property
    def width(self) -> int:
        """Carries: the sum, and where the mask moves, where it ever held."""
        return 2 if self.mask_moves else 1

    def start(self, b: Builder) -> list[Value]:
        """Before the first trip."""
        zero = b.const(0.0, self.peeled.value.element)
        if not self.mask_moves:
            return [b.whole(zero, self.peeled.value.shape)]
        shape = self.op.offset.shape
        return [b.whole(zero, shape), b.whole(b.const(False, "i1"), shape)]

    def add(self, copier: Copier, carries: Sequence[Value]) -> list[Value]:
        """One trip."""
        b, part = copier.b, copier[self.peeled.value]
        if not self.mask_moves or self.op.mask is None:
            return [b.add(carries[0], part)]
        mask = copier[self.op.mask]
        kept = b.select(mask, part, b.zero(part))
        return [b.add(carries[0], kept), b.elementwise(Code.OR, (carries[1], mask))]

    def finish(self, copier: Copier, total: Total) -> None:
        """Write the sum; where no trip took part and the mask does not bound its place, that may be none."""
        op, b = self.op, copier.b
        value = self.peeled.rebuilt(copier, total.carries[0])
        mask = total.carries[1] if self.mask_moves else None if op.mask is None else copier[op.mask]
        for part in self.still:  # they hold wherever the mask ever did, and bound the address
            mask = copier[part] if mask is None else b.logical_and(mask, copier[part])
        ran: Value | None = None
        for one in total.ran:
            if one is None:
                ran = None
                break
            ran = one if ran is None else b.elementwise(Code.OR, (ran, one))
        if ran is not None:
            mask = ran if mask is None else b.logical_and(mask, ran)
        b.store(copier[op.base], copier.whole(op.offset), value, mask, Code.ATOMIC_ADD)


@dataclass
class Total:
    """The sum of one job, or of several in phases after each other."""

    job: Job
    copier: Turned
    """That knows the job's place."""
    carries: list[Value]
    ran: list[Value | None] = field(default_factory=list)
    """Of each phase, whether a trip took part; None where one always does, or none has to."""
