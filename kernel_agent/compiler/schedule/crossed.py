"""`crossed`: additions to the tile of one axis of the grid as additions to that of another, done by the program across.

A product of a matrix with itself, as of covariances, has a program for each pair of tiles of one tensor, and adds to
both. Where the grid is as long as it is wide, each pair of numbers belongs to a program in either order: the addition
to the second tile is left to the program whose numbers are exchanged, for which that is the first. All additions to a
gradient then have the tile of one axis, and one owner (see `owner`), which goes through the tiles of the other.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from itertools import combinations

from kernel_agent.compiler.errors import DoesNotApply
from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.fuse import fused
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.orient import SWAP, Turner
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied, hints
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

_ORDERED = (EFFECTS - {Code.ATOMIC_ADD}) | {Code.WHILE, Code.TAPE_LOAD}
"""What a program cannot do twice, or for another one."""


@dataclass(frozen=True)
class Crossed:
    """A kernel that adds the same, and its launch."""

    kernel: Kernel
    launch: Launch
    facts: tuple[Fact, ...]
    """Under which it does."""


def crossed(kernel: Kernel, launch: Launch) -> Crossed:
    """The kernel crossed, for the first two axes of the grid that one gradient has tiles of. Raises DoesNotApply where
    there are none, or the grid is not known to be as long as it is wide."""
    written = written_to(kernel.body)
    loaded = {op.base for op in kernel.ops if op.code is Code.LOAD}
    if written & loaded or any(op.code in _ORDERED for op in kernel.ops):
        raise DoesNotApply("what programs do has an order")
    forms = Forms(kernel, launch)
    for axis, other in combinations(range(len(launch.grid)), 2):
        moved = _moved(forms, axis, other)
        height, width = launch.grid[axis], launch.grid[other]
        expression = f"{height.text()} == {width.text()}"
        if not moved or not (height == width or launch.calls.show((expression,))):
            continue
        facts = () if height == width else (Fact(expression, "each program has one across"),)
        mine = _Crosser(kernel, Builder(emptied(kernel), written), set(), moved)
        mine.block(kernel.body)
        _Crosser(kernel, mine.b, {axis, other}, moved).block(kernel.body)
        grid = tuple(height if place == other else extent for place, extent in enumerate(launch.grid))
        on = replace(launch, grid=grid)
        made = fused(prune(mine.b.kernel), products=True)
        return Crossed(prune(_Aligner(made, on, {op.base for op in moved}).copy()), on, facts)
    raise DoesNotApply("no gradient has tiles of two axes that are as long")


def _moved(forms: Forms, axis: int, other: int) -> set[Op]:
    """Additions to tiles of the second axis, of gradients that have additions to tiles of the first."""
    found: dict[str, tuple[set[Op], set[Op]]] = {}
    for site in sites(forms.kernel.body, frozenset((Code.ATOMIC_ADD,))):
        sources = forms.of(site.op.offset).sources
        mine, theirs = forms.program(axis) in sources, forms.program(other) in sources
        if mine != theirs:
            found.setdefault(site.op.base.name, (set(), set()))[theirs].add(site.op)
    return {op for stay, move in found.values() if stay for op in move}


class _Crosser(Copier):
    """Copies the additions that stay or, for a program with two of its numbers exchanged, those that are moved."""

    def __init__(self, source: Kernel, b: Builder, axes: Set[int], moved: Set[Op]) -> None:
        super().__init__(source, b)
        self.axes = axes
        self.moved = moved

    def pure(self, op: Op) -> None:
        """Programs."""
        if op.code is Code.PROGRAM_ID and op.attributes["axis"] in self.axes:
            (across,) = self.axes - {op.attributes["axis"]}
            self[op.result] = self.b.program_id(across)
        else:
            super().pure(op)

    def effect(self, op: Op) -> None:
        """Additions."""
        if (op in self.moved) == bool(self.axes):
            super().effect(op)


class _Aligner(Turner):
    """Copies additions of tiles that are the transposes of others to the same gradient as such tiles: one sum. Loads
    that lie across rows are those of rows, turned: what both sides load is loaded once."""

    def __init__(self, source: Kernel, launch: Launch, bases: Set[Value]) -> None:
        super().__init__(source, frozenset())
        forms = Forms(source, launch)
        loads = [op for op in source.ops if op.code is Code.LOAD]
        added = [site.op for site in sites(source.body, frozenset((Code.ATOMIC_ADD,))) if site.op.base in bases]
        places = [(op, forms.of(op.offset)) for op in (*added, *loads) if len(op.offset.shape) == len(SWAP)]
        straight = {(op.base, place) for op, place in places if _is_row(place)}
        self.away = {op for op, place in places if (op.base, place.moved(SWAP.index)) in straight}

    def load(self, op: Op) -> None:
        """A LOAD."""
        if op not in self.away:
            super().load(op)
            return
        mask, other = (None if value is None else self.over(value) for value in (op.mask, op.other))
        tile = self.b.load(self[op.base], self.over(op.offset), mask, other, op.result.name, **hints(op))
        self[op.result] = self.b.trans(tile, SWAP)

    def effect(self, op: Op) -> None:
        """Additions."""
        if op not in self.away:
            super().effect(op)
            return
        mask = None if op.mask is None else self.over(op.mask)
        self.b.store(self[op.base], self.over(op.offset), self.over(op.stored), mask, op.code)


def _is_row(place: Form) -> bool:
    """Whether elements of a tile that are side by side are so in memory."""
    return any(atom.kind is Kind.LANE and atom.number == 1 and step == ONE for atom, step in place.terms)
