"""`persistent`: gradients that all programs along an axis add to, as partial sums of far fewer programs, one each.

The axis becomes a loop: each program takes every n-th of what were programs, keeps the sums in registers, and stores
them once, into a row of its own. Torch then sums the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.coverage import covered_if, domain
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import Injectivity, injective
from kernel_agent.compiler.schedule.ownership import WRITES, Common
from kernel_agent.compiler.schedule.pace import PER_PROCESSOR, STAGES, Pace, pace
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

STAYS = frozenset((Code.LEAVE_IF, Code.TAPE_STORE, Code.TAPE_LOAD, Code.BARRIER, Code.WHILE))
"""What is not repeated: programs that end early, and what is remembered for one program."""


@dataclass(frozen=True)
class Partial:
    """A buffer of partial sums: one row for every program along the axis."""

    name: str
    """Of the argument that takes the place of the gradient's."""
    tensor: str
    """The input whose gradient it is."""
    facts: tuple[str, ...]
    """What must hold: the tensor has no gaps, and no two lanes store to one element of a row."""
    empty_if: str
    """Expression under which a row is stored to as a whole; empty: not known."""


@dataclass(frozen=True)
class Persistent:
    """A kernel whose axis `axis` is a loop."""

    kernel: Kernel
    launch: Launch
    count: str
    """Expression of the programs along the axis."""
    scalars: dict[str, str]
    """Expressions of arguments that the forward did not have."""
    partials: dict[str, Partial]
    """By name of the gradient's argument."""
    pace: Pace | None
    """None: as the forward was launched."""


def summed_axes(kernel: Kernel, gradients: Mapping[str, str], launch: Launch) -> list[int]:
    """The axes of the grid along which gradients that are no plain stores add up.

    Of several, first that with the most additions, and of equals, if registers can hold the sums along each, the one
    that was longest in the calls that were seen: sums along the others are as many rows as these are long.
    """
    forms = Forms(kernel, launch)
    found = [
        (atom.number, site)
        for site in sites(kernel.body, frozenset((Code.ATOMIC_ADD,)))
        if site.op.base.name in gradients.values()
        for atom in sorted(domain(forms, site) - forms.of(site.op.offset).sources, key=lambda atom: atom.key)
        if not atom.kind
    ]
    axes = [axis for axis, _ in found]
    held = all(not site.loops for _, site in found)

    def worth(axis: int) -> tuple[int, int]:
        length = launch.calls.total(launch.grid[axis].text()) if held else None
        return axes.count(axis), length or 0

    return sorted(sorted(set(axes)), key=worth, reverse=True)


def persistent(kernel: Kernel, gradients: Mapping[str, str], forward: Launch, axis: int) -> Persistent:
    """The kernel with the axis as a loop, and partial sums of what is added to in all its trips.

    Raises CannotDerive where programs end early, keep tapes or wait for each other, and where no sum of the axis fits
    one program.
    """
    if any(op.code in STAYS for op in kernel.ops):
        raise CannotDerive(f"{kernel.name} cannot do the work of several programs in one: it keeps tapes or ends early")
    speed = pace(Forms(kernel, forward), axis)
    count = Polynomial.symbol(_programs(kernel, forward.grid, axis, speed), positive=True)
    rows = kernel.free_name("num_rows")
    grid = tuple(count if place == axis else extent for place, extent in enumerate(forward.grid))
    launch = replace(forward, grid=grid, scalars={**forward.scalars, rows: forward.grid[axis]})
    looped = accumulated(_Looped(kernel, axis, rows, speed.stages if speed else "").copy())
    forms = Forms(looped, launch)
    written: dict[str, list[Site]] = {}
    for site in sites(looped.body, WRITES):
        written.setdefault(site.op.base.name, []).append(site)
    partials = {}
    for tensor, name in gradients.items():
        found = _partial(forms, tensor, written.get(name, []), axis)
        if found is not None:
            partials[name] = found
    sums = [name for tensor, name in gradients.items() if _sums(forms, tensor, written.get(name, []), axis)]
    if not sums:
        raise CannotDerive("no sum over rows fits the registers of one program")
    final = _Partials(looped, axis, partials).copy()
    return Persistent(final, launch, count.text(), {rows: forward.grid[axis].text()}, partials, speed)


def _programs(kernel: Kernel, grid: tuple[Polynomial, ...], axis: int, speed: Pace | None) -> str:
    """As many programs as all processors run at once, or fewer."""
    tensor = next(value.name for value in kernel.arguments if value.is_pointer)
    processors = f"torch.cuda.get_device_properties({tensor}.device).multi_processor_count"
    others = ONE
    for other, extent in enumerate(grid):
        others = others if other == axis else others * extent
    if speed is not None:
        processors = f"{PER_PROCESSOR} * {processors}"
    if others != ONE:
        processors = f"max(1, {processors} // ({others.text()}))"
    return f"min({grid[axis].text()}, {processors})"


def _partial(forms: Forms, tensor: str, written: list[Site], axis: int) -> Partial | None:
    """All additions to a gradient, after all loops, to the same elements by all programs along the axis, of a tensor
    without gaps."""
    laid_out = f"{tensor}.is_contiguous()"
    proof = _sums(forms, tensor, written, axis)
    if proof is None or forms.launch.calls.refute((laid_out,)):
        return None
    row = Forms(forms.kernel, replace(forms.launch, grid=_without(forms.launch.grid, axis)))
    empty_if = covered_if(row, written, tensor)
    return Partial(f"{written[0].op.base.name}_rows", tensor, (laid_out, *proof.facts()), empty_if)


def _sums(forms: Forms, tensor: str, written: list[Site], axis: int) -> Injectivity | None:
    """That additions to a gradient come after all loops, and that each program along the axis adds to the same
    elements, once."""
    if not written or not forms.kernel.argument(tensor).is_pointer:
        return None
    program = forms.program(axis)
    for site in written:
        asked = [site.op.offset, *([] if site.op.mask is None else [site.op.mask])]
        if site.op.code is not Code.ATOMIC_ADD or site.loops or site.branches:
            return None
        if any(program in forms.reads(value) for value in asked):
            return None
    common = Common.of(forms, written)
    if common is None:
        return None
    told = (domain(forms, written[0]) - {program}) | common.copies
    return injective(common.form, common.bounds, told, forms.launch.calls)


def _without(grid: tuple[Polynomial, ...], axis: int) -> tuple[Polynomial, ...]:
    """The grid with one program along the axis."""
    return tuple(Polynomial.integer(1) if place == axis else extent for place, extent in enumerate(grid))


class _Looped(Copier):
    """Does the work of every n-th program along an axis in a loop."""

    def __init__(self, source: Kernel, axis: int, rows: str, stages: str) -> None:
        self.rows = Value("i32", (), rows)
        empty = emptied(source, arguments=[*source.arguments, self.rows])
        self.hints = {"num_stages": stages} if stages else {}
        empty.constants |= dict.fromkeys(self.hints.values(), STAGES)
        super().__init__(source, Builder(empty))
        self.b.written = self.written
        self.axis = axis
        self.row: Value | None = None

    def copy(self) -> Kernel:
        """All of it."""
        b = self.b

        def body(row: Value, _: list[Value]) -> list[Value]:
            self.row = row
            self.block(self.source.body)
            return []

        name = next((op.result.name for op in self.source.ops if self.reads_axis(op) and op.result.name), "row")
        trips = (b.program_id(self.axis), self.rows, b.num_programs(self.axis))
        # There are no more programs than rows.
        b.loop(trips, [], body, index_name=name, certain=True, **self.hints)
        return b.kernel

    def reads_axis(self, op: Op) -> bool:
        """Whether an operation is the number of the program along the axis."""
        return op.code is Code.PROGRAM_ID and op.attributes["axis"] == self.axis

    def pure(self, op: Op) -> None:
        """What the axis was."""
        if self.reads_axis(op) and self.row is not None:
            self[op.result] = self.row
        elif op.code is Code.NUM_PROGRAMS and op.attributes["axis"] == self.axis:
            self[op.result] = self.rows
        else:
            super().pure(op)


class _Partials(Copier):
    """Stores what is left to add to rows of their own."""

    def __init__(self, source: Kernel, axis: int, partials: Mapping[str, Partial]) -> None:
        self.rows: dict[Value, tuple[Value, Value]] = {}
        arguments: list[Value] = []
        widths: list[Value] = []
        for value in source.arguments:
            if value.name in partials:
                row = Value(value.element, (), partials[value.name].name)
                width = Value("i64", (), width_of(partials[value.name]))
                self.rows[value] = (row, width)
                arguments.append(row)
                widths.append(width)
            else:
                arguments.append(value)
        super().__init__(source, Builder(emptied(source, arguments=[*arguments, *widths])))
        self.b.written = self.written | {row for row, _ in self.rows.values()}
        self.axis = axis

    def effect(self, op: Op) -> None:
        """Additions to what has rows."""
        if self.slicing or "base" not in op.attributes or op.base not in self.rows:
            super().effect(op)
            return
        b = self.b
        row, width = self.rows[op.base]
        start = b.mul(b.cast(b.program_id(self.axis), "i64"), width)
        mask = None if op.mask is None else self[op.mask]
        b.store(row, b.add(start, b.cast(self.whole(op.offset), "i64")), self[op.stored], mask)


def width_of(partial: Partial) -> str:
    """The argument that says how far apart the rows of a buffer of partial sums are."""
    return f"{partial.name}_width"
