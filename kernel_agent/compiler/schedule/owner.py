"""`split`: kernels of their own for gradients that many programs add to: elements and sum change places.

What a gradient's address depends on becomes the grid; what it does not depend on becomes a loop that sums registers:
of a product C = A B, whose programs each have a tile of C and loop over tiles of A and B, the programs of the gradient
of A each have a tile of A and loop over tiles of C. Nothing is left that two programs add to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import UNKNOWN, Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom, Kind
from kernel_agent.compiler.schedule.peel import Peeled, peel
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, walk

AXES = 3
"""Of a grid."""


@dataclass(frozen=True)
class Turn:
    """Which indices change places for some additions. Additions with equal turns share a kernel."""

    programs: tuple[int, ...]
    """Axes of the grid that their addresses depend on."""
    trips: tuple[Op, ...]
    """Loops whose trips their addresses depend on; these become axes."""
    summed: tuple[int, ...]
    """Axes that become loops."""
    inner: tuple[Op, ...]
    """Loops around that stay loops, within those."""
    conditions: tuple[tuple[Value, bool], ...]
    """Under which they are done."""


@dataclass(frozen=True)
class Owner:
    """A kernel whose programs own what they sum."""

    kernel: Kernel
    launch: Launch
    scalars: dict[str, str]
    """Expressions of arguments that the forward did not have."""


def turn_of(forms: Forms, site: Site) -> Turn | str:
    """How an addition is to be turned, or why it cannot be."""
    address = forms.of(site.op.offset)
    sources = address.sources
    if any(atom.kind is Kind.OPAQUE for atom in sources):
        return "its addresses are read from memory, or are no sums of products"
    if any(loop.code is Code.WHILE for loop in site.loops):
        return "it is added to in a while loop"
    read = {op.attributes["axis"] for op in forms.kernel.ops if op.code is Code.PROGRAM_ID}
    axes = [axis for axis in range(len(forms.launch.grid)) if axis in read]
    programs = tuple(axis for axis in axes if forms.program(axis) in sources)
    summed = tuple(axis for axis in axes if axis not in programs)
    trips = tuple(loop for loop in site.loops if forms.trip(loop) in sources)
    inner = tuple(loop for loop in site.loops if loop not in trips)
    if not summed:
        return "no sum over programs would change that"
    if not programs and not trips:
        return "all programs add to all of it"
    if len(programs) + len(trips) > AXES:
        return "it would need a grid of more than three axes"
    for loop in trips:
        extent = forms.trip(loop).extent
        if extent is None or not extent.printable:
            return f"the trips of the loop over `{loop.blocks[0].arguments[0].name}` differ from program to program"
    return Turn(programs, trips, summed, inner, site.conditions)


def owner(forms: Forms, turn: Turn, added: Sequence[Op], name: str) -> Owner:
    """The kernel of additions that have one turn.

    Raises CannotDerive where what they add depends on earlier trips of a loop, or would be computed again and again.
    """
    source = forms.kernel
    places = _places(turn)
    programs: dict[int, Value] = {}
    counts = {axis: Value("i32", (), _free(f"num_programs_{axis}", source)) for axis in _counted(source, turn)}
    made = emptied(source, name=name, arguments=[*source.arguments, *counts.values()])
    copier = _Turned(source, Builder(made, frozenset(op.base for op in added)), programs, counts)
    b = copier.b
    for axis in turn.programs:
        programs[axis] = b.program_id(places[axis])
    for loop in turn.trips:
        start, _, step = (copier[value] for value in loop.operands[:3])
        index = b.add(start, b.mul(b.cast(b.program_id(places[loop]), start.element), step))
        copier[loop.blocks[0].arguments[0]] = index
    moving = _moving(forms, turn)
    jobs = [_Job.of(forms, op, moving) for op in added]
    sums = _summed(copier, turn, jobs)
    for job in jobs:
        found, sums = sums[: job.carries], sums[job.carries :]
        job.finish(copier, found)
    _refuse_again(made, len(turn.summed) + len(turn.inner))
    forward = forms.launch
    grid = [Polynomial.integer(1)] * (1 + max(places.values()))
    for key, place in places.items():
        extent = forward.grid[key] if isinstance(key, int) else forms.trip(key).extent
        assert extent is not None
        grid[place] = extent
    scalars = {value.name: forward.grid[axis] for axis, value in counts.items()}
    launch = Launch(tuple(grid), {**forward.scalars, **scalars})
    return Owner(made, launch, {text: extent.text() for text, extent in scalars.items()})


def _places(turn: Turn) -> dict[int | Op, int]:
    """Axes of the new grid: those of the old one stay where they were, loops fill the gaps from the first one on."""
    places: dict[int | Op, int] = {axis: axis for axis in turn.programs}
    free = [axis for axis in range(AXES) if axis not in turn.programs]
    places.update(zip(turn.trips, free, strict=False))
    return places


def _counted(source: Kernel, turn: Turn) -> list[int]:
    """Axes whose number of programs the new kernel is told: those it sums over, and those the old one asked for."""
    asked = {op.attributes["axis"] for op in source.ops if op.code is Code.NUM_PROGRAMS}
    return sorted({*turn.summed, *asked})


def _moving(forms: Forms, turn: Turn) -> frozenset[Atom]:
    """Indices of the loops of the new kernel, and what may be one."""
    trips = [forms.trip(loop) for loop in turn.inner]
    return frozenset([UNKNOWN, *trips, *(forms.program(axis) for axis in turn.summed)])


def _summed(copier: _Turned, turn: Turn, jobs: Sequence[_Job]) -> list[Value]:
    """The loops over what is summed, one in the other; returns the sums."""
    b = copier.b
    start = [carry for job in jobs for carry in job.start(b)]

    def nest(rest: list[int | Op], carries: list[Value]) -> Sequence[Value]:
        if not rest:
            return conditional(list(turn.conditions), carries)
        first, *others = rest

        def body(index: Value, inner: list[Value]) -> Sequence[Value]:
            if isinstance(first, int):
                copier.programs[first] = index
            else:
                copier[first.blocks[0].arguments[0]] = index
            return nest(others, inner)

        if isinstance(first, int):
            trips = (b.const(0), copier.counts[first], b.const(1))
            name = next((op.result.name for op in copier.source.ops if _is_program(op, first)), "")
            found = b.loop(trips, carries, body, index_name=name or f"program_{first}", certain=True)
            del copier.programs[first]
            return found
        low, high, step = (copier[value] for value in first.operands[:3])
        return b.loop((low, high, step), carries, body, index_name=first.blocks[0].arguments[0].name)

    def conditional(rest: list[tuple[Value, bool]], carries: list[Value]) -> Sequence[Value]:
        if rest:
            (condition, holds), *others = rest
            sides: list[Callable[[], Sequence[Value]]] = [lambda: conditional(others, carries), lambda: carries]
            return b.branch(copier[condition], *(sides if holds else sides[::-1]))
        found: list[Value] = []
        for job in jobs:
            found += job.add(copier, carries[len(found) : len(found) + job.carries])
        return found

    return list(nest([*turn.summed, *turn.inner], start))


def _is_program(op: Op, axis: int) -> bool:
    return op.code is Code.PROGRAM_ID and op.attributes["axis"] == axis


@dataclass(frozen=True)
class _Job:
    """One addition."""

    op: Op
    peeled: Peeled
    """What is done to the sum rather than to what is summed."""
    mask_moves: bool
    """The mask changes from trip to trip."""

    @classmethod
    def of(cls, forms: Forms, op: Op, moving: frozenset[Atom]) -> _Job:
        """`moving`: indices of the loops that sum."""
        moves = op.mask is not None and not forms.reads(op.mask).isdisjoint(moving)
        still = Peeled(op.stored) if moves else peel(forms, op.stored, moving)
        return cls(op, still, moves)

    @property
    def carries(self) -> int:
        """The sum, and where the mask moves, where it ever held."""
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

    def finish(self, copier: Copier, found: Sequence[Value]) -> None:
        """Write the sum. Loads in what scales it need no guard: the loop has run."""
        op, b = self.op, copier.b
        value = self.peeled.rebuilt(copier, found[0])
        mask = found[1] if self.mask_moves else None if op.mask is None else copier[op.mask]
        b.store(copier[op.base], copier.whole(op.offset), value, mask, Code.ATOMIC_ADD)


class _Turned(Copier):
    """Copies slices in which programs are other programs, or indices of loops."""

    def __init__(self, source: Kernel, b: Builder, programs: dict[int, Value], counts: Mapping[int, Value]) -> None:
        super().__init__(source, b)
        self.programs = programs
        self.counts = counts

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


def _refuse_again(made: Kernel, depth: int) -> None:
    """Refuse loops within the loops that sum: they would compute the same for program after program."""
    loops = [op for op in made.ops if op.code is Code.FOR]
    if len(loops) > depth or any(op.code is Code.WHILE for op in made.ops):
        raise CannotDerive("what it sums would be computed anew in every program: it comes out of a loop itself")


def _free(name: str, kernel: Kernel) -> str:
    """A name that no argument or constexpr has."""
    taken = {value.name for value in kernel.arguments} | set(kernel.constants)
    while name in taken:
        name += "_"
    return name


def without(kernel: Kernel, dropped: frozenset[Op]) -> Kernel | None:
    """The kernel without some additions; None where it writes nothing then."""
    left = _Without(kernel, dropped).copy()
    writes = (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC)
    return left if any(op.code in writes for op in walk(left.body)) else None


class _Without(Copier):
    """Copies all but some additions."""

    def __init__(self, source: Kernel, dropped: frozenset[Op]) -> None:
        super().__init__(source)
        self.dropped = dropped

    def effect(self, op: Op) -> None:
        """Additions."""
        if op not in self.dropped:
            super().effect(op)
