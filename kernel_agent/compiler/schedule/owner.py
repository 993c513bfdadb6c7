"""`split`: kernels of their own for gradients that many programs add to: elements and sum change places.

What a gradient's address depends on becomes the grid; what it does not depend on becomes a loop that sums registers:
of a product C = A B, whose programs each have a tile of C and loop over tiles of A and B, the programs of the gradient
of A each have a tile of A and loop over tiles of C. Nothing is left that two programs add to.

A loop that has as many trips as memory says, as over the rows of a sequence, is no axis of a grid. Where these are the
same for all programs whose additions meet, their owner goes through them itself, and sums in each trip.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.phases import Job, Total, Turned, phases, tile_of
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.sites import OwnRows, Site
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

AXES = 3
"""Of a grid."""


@dataclass(frozen=True)
class Turn:
    """Which indices change places for some additions. Additions with equal turns share a kernel."""

    programs: tuple[int, ...]
    """Axes of the grid that their addresses depend on."""
    trips: tuple[Op, ...]
    """Loops whose trips their addresses depend on; these become axes. One of several over the same range stands for
    all of them."""
    summed: tuple[int, ...]
    """Axes that become loops."""
    kept: tuple[Op, ...] = ()
    """The loop that their addresses depend on if it stays one, around those."""


@dataclass(frozen=True)
class Owner:
    """A kernel whose programs own what they sum."""

    kernel: Kernel
    launch: Launch
    scalars: dict[str, str]
    """Expressions of arguments that the forward did not have."""


class Turns:
    """Finds the turns of additions of one kernel."""

    def __init__(self, forms: Forms, axes: int = AXES) -> None:
        """`axes`: from which axis of the grid on they are parts of others; loops over those lie outside."""
        self.forms = forms
        self.axes = axes
        self._alike: dict[tuple[tuple[Form, ...], int], Op] = {}

    def of(self, site: Site, *, crossing: bool = False) -> Turn | str:
        """How an addition is to be turned, or why it cannot be. `crossing`: see `are_crossing`."""
        forms = self.forms
        sources = forms.of(site.op.offset).sources
        if any(atom.kind is Kind.OPAQUE for atom in sources):
            return "its addresses are read from memory, or are no sums of products"
        if any(loop.code is Code.WHILE for loop in site.loops):
            return "it is added to in a while loop"
        read = {op.attributes["axis"] for op in forms.kernel.ops if op.code is Code.PROGRAM_ID}
        axes = [axis for axis in range(len(forms.launch.grid)) if axis in read]
        programs = tuple(axis for axis in axes if forms.program(axis) in sources)
        summed = tuple(
            sorted((axis for axis in axes if axis not in programs), key=lambda axis: (axis < self.axes, axis))
        )
        trips = own_loops(forms, site)
        if not summed and not (crossing and trips and self._are_outermost(site)):
            return "no sum over programs would change that"
        if not programs and not trips:
            return "all programs add to all of it"
        kept = tuple(first for first in self._firsts(trips) if not self._is_axis(first))
        if len(programs) + len(trips) - len(kept) > AXES:
            return "it would need a grid of more than three axes"
        if kept and (len(trips) > 1 or not self._same_for_all(kept[0], programs)):
            name = kept[0].blocks[0].arguments[0].name
            return f"the trips of the loop over `{name}` differ from program to program"
        return Turn(programs, () if kept else self._firsts(trips), summed, kept)

    def _are_outermost(self, site: Site) -> bool:
        """Whether all that loops compute is computed within those of an addition: owners of what trips add to compute
        nothing anew that a program computed once for all of them."""
        first = site.loops[0]
        return all(op is first or op.code is not Code.FOR for op in self.forms.kernel.body.ops)

    def _is_axis(self, loop: Op) -> bool:
        """Whether all programs make as many trips, which the launch can tell."""
        extent = self.forms.trip(loop).extent
        return extent is not None and extent.printable

    def _same_for_all(self, loop: Op, programs: Sequence[int]) -> bool:
        """Whether a loop makes the same trips in all programs that have the same numbers along some axes."""
        known = {self.forms.program(axis) for axis in programs}
        return all(self.forms.reads(value) <= known for value in loop.operands[:3])

    def _firsts(self, loops: Sequence[Op]) -> tuple[Op, ...]:
        """The first loops that were seen over the same ranges, one for each: loops within each other may have one."""
        found: list[Op] = []
        for loop in loops:
            over = tuple(self.forms.of(value) for value in loop.operands[:3])
            place = 0
            while (first := self._alike.setdefault((over, place), loop)) in found:
                place += 1
            found.append(first)
        return tuple(found)


def own_loops(forms: Forms, site: Site) -> tuple[Op, ...]:
    """Loops around an addition whose trips its address depends on."""
    sources = forms.of(site.op.offset).sources
    return tuple(loop for loop in site.loops if forms.trip(loop) in sources)


def are_crossing(forms: Forms, added: Sequence[Site]) -> bool:
    """Whether the trips that one addition's address depends on are those of a loop that sums what another one adds."""
    own = {loop for site in added for loop in own_loops(forms, site)}
    return any(loop in own and loop not in own_loops(forms, site) for site in added for loop in site.loops)


def owner(forms: Forms, turn: Turn, added: Sequence[Site], name: str) -> Owner:
    """The kernel of additions that have one turn.

    Raises CannotDerive where what they add depends on earlier trips of a loop, or would be computed again and again.
    """
    source = forms.kernel
    places = _places(turn)
    programs: dict[int, Value] = {}
    counts: dict[int, Value] = {}
    for axis in _counted(source, turn):
        count = f"num_blocks_{tile_of(source, axis)}"
        if count == "num_blocks_" or any(count == value.name for value in counts.values()):
            count = f"num_programs_{axis}"
        counts[axis] = Value("i32", (), source.free_name(count))
    made = emptied(source, name=name, arguments=[*source.arguments, *counts.values()])
    copier = Turned(source, Builder(made, frozenset(site.op.base for site in added)), programs, counts)
    b = copier.b
    for axis in turn.programs:
        programs[axis] = b.program_id(places[axis])
    depth = 0
    if turn.kept and len(added) > 1:
        raise CannotDerive("several additions stand in loops whose trips memory counts")
    if turn.kept:
        first, *_ = turn.kept

        def body(index: Value, _: list[Value]) -> Sequence[Value]:
            nonlocal depth
            for site in added:
                for loop in own_loops(forms, site):
                    copier[loop.blocks[0].arguments[0]] = index
            depth = _sum_up(copier, forms, turn, added, places)
            return ()

        start, stop, step = copier.bounds(first)
        b.loop((start, stop, step), (), body, index_name=first.blocks[0].arguments[0].name)
    else:
        _number_trips(copier, forms, turn, added, places)
        depth = _sum_up(copier, forms, turn, added, places)
    _refuse_again(made, depth + len(turn.kept))
    forward = forms.launch
    grid = [Polynomial.integer(1)] * (1 + max(places.values()))
    own = next((forward.grid[site.axis] for site in added if isinstance(site, OwnRows) and not site.fact), None)
    for key, place in places.items():
        extent = forward.grid[key] if isinstance(key, int) else own or forms.trip(key).extent
        assert extent is not None
        grid[place] = extent
    scalars = {value.name: forward.grid[axis] for axis, value in counts.items()}
    launch = replace(forward, grid=tuple(grid), scalars={**forward.scalars, **scalars})
    texts = {text: extent.text() for text, extent in launch.scalars.items()}
    return Owner(made, launch, texts)


def _number_trips(
    copier: Turned, forms: Forms, turn: Turn, added: Sequence[Site], places: Mapping[int | Op, int]
) -> None:
    """Have programs be the trips that addresses of additions depend on."""
    b = copier.b
    for site in added:
        for loop, trips in zip(own_loops(forms, site), turn.trips, strict=not isinstance(site, OwnRows)):
            start, _, step = (copier[value] for value in loop.operands[:3])
            index = b.add(start, b.mul(b.cast(b.program_id(places[trips]), start.element), step))
            copier[loop.blocks[0].arguments[0]] = index


def _sum_up(copier: Turned, forms: Forms, turn: Turn, added: Sequence[Site], places: Mapping[int | Op, int]) -> int:
    """Write the loops that sum, and the additions of what they find. Returns how many loops these are."""
    totals: dict[Hashable, Total] = {}
    depth = 0
    parts = phases(forms, turn, added)
    crossing = are_crossing(forms, added)
    for phase in parts:
        within = copier
        if crossing:  # one addition's trip is a loop that sums another one's
            within = Turned(copier.source, copier.b, dict(copier.programs), copier.counts)
            _number_trips(within, forms, turn, phase.sites, places)
        if phase.own is not None:
            index = copier.b.program_id(places[turn.trips[0]])
            within = Turned(copier.source, copier.b, {**copier.programs, phase.own: index}, copier.counts)
            phase = replace(phase, index=index)
        jobs = [Job.of(forms, site.op, phase.moving, phase.conditions) for site in phase.sites]
        mine = [totals.setdefault(job.key(within), Total(job, within, job.start(copier.b))) for job in jobs]
        before = _loops(copier.b.kernel)
        ran = phase.run(within, jobs, mine)
        for total, job in zip(mine, jobs, strict=True):
            took_part = None if job.placed else ran
            if all(one is not took_part for one in total.ran):
                total.ran.append(took_part)
        once = not phase.summed and (phase.own is not None or not phase.inner)  # as often as the forward's program does
        depth += _loops(copier.b.kernel) - before if once else len(phase.summed) + len(phase.inner)
    for total in totals.values():
        total.job.finish(total.copier, total)
    return depth


def _places(turn: Turn) -> dict[int | Op, int]:
    """Axes of the new grid: those of the old one stay where they were, loops and parts of axes fill the gaps from the
    first one on."""
    places: dict[int | Op, int] = {axis: axis for axis in turn.programs if axis < AXES}
    free = [axis for axis in range(AXES) if axis not in places]
    places.update(zip((*turn.trips, *(axis for axis in turn.programs if axis >= AXES)), free, strict=False))
    return places


def _counted(source: Kernel, turn: Turn) -> list[int]:
    """Axes whose number of programs the new kernel is told: those it sums over, and those the old one asked for."""
    asked = {op.attributes["axis"] for op in source.ops if op.code is Code.NUM_PROGRAMS}
    return sorted({*turn.summed, *asked})


def _refuse_again(made: Kernel, depth: int) -> None:
    """Refuse loops within the loops that sum: they would compute the same for program after program."""
    if _loops(made) > depth or any(op.code is Code.WHILE for op in made.ops):
        raise CannotDerive("what it sums would be computed anew in every program: it comes out of a loop itself")


def _loops(kernel: Kernel) -> int:
    """How many there are."""
    return sum(op.code is Code.FOR for op in kernel.ops)


def without(kernel: Kernel, dropped: Set[str]) -> Kernel | None:
    """The kernel without additions to some arguments; None where it writes nothing then."""
    left = prune(_Without(kernel, dropped).copy())
    writes = (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC)
    return left if any(op.code in writes for op in left.ops) else None


class _Without(Copier):
    """Copies all but some additions."""

    def __init__(self, source: Kernel, dropped: Set[str]) -> None:
        super().__init__(source)
        self.dropped = dropped

    def effect(self, op: Op) -> None:
        """Additions."""
        if op.code is not Code.ATOMIC_ADD or op.base.name not in self.dropped:
            super().effect(op)
