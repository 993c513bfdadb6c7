"""`Shared`: what every program of the forward's grid computes once, kept in memory for kernels that would do so again.

A kernel that owns keys visits all rows, and would compute the rows' sum of dO * O again for every block of keys; one
that owns a matrix would take the derivative of an activation for every block of columns. The forward's grid has one
program for each of these values: it stores them, at an address that it knows from a load of the same lanes or, of
what comes out of a loop, in a row of its own, and the owners load them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.plan import Buffer, Fact, Fill
from kernel_agent.compiler.saved.lanes import form
from kernel_agent.compiler.schedule.coverage import domain
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import injective
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.rasters import OF_TILES
from kernel_agent.compiler.schedule.segments import segments
from kernel_agent.compiler.schedule.sites import Site, bounds, sites
from kernel_agent.compiler.schedule.unmask import conjuncts, vanishes
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.programs import program_number
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import captured, computed_of
from kernel_agent.compiler.ssa.value import NARROW, Kernel, Op, Value, beneath, constant, unspread

WORK = CONTROL | {
    Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.CUMSUM, Code.DOT, Code.EXP, Code.EXP2, Code.LOG, Code.LOG2,
    Code.TANH, Code.ERF, Code.SIGMOID, Code.SIN, Code.COS,
}  # fmt: skip
"""What is not done again for every tile where the result can be kept."""


_SPREADS = frozenset((Code.EXPAND, Code.BROADCAST, Code.FULL, Code.TRANS, Code.NEG))


@dataclass(frozen=True)
class Shared:
    """One value, and where it is kept."""

    value: Value
    place: Op | None
    """A load at whose address, and under whose mask, it is stored; None: every program has a row."""
    pointer: Value
    """The argument of the kernels that points there."""
    shape: tuple[str, ...] = ()
    """Of rows."""
    facts: tuple[Fact, ...] = ()
    """What must hold for no two programs to store to one address."""

    @property
    def buffer(self) -> Buffer:
        """The memory."""
        like = "" if self.place is None else self.place.base.name
        return Buffer(self.pointer.name, self.pointer.pointee, Fill.EMPTY, like=like, shape=self.shape)


_ROLES = {
    Code.ADD: "total", Code.SUB: "difference", Code.MUL: "product", Code.DOT: "product", Code.DIV: "ratio",
    Code.EXP: "power", Code.EXP2: "power", Code.SELECT: "chosen",
}  # fmt: skip


def shared(kernel: Kernel, launch: Launch) -> list[Shared]:
    """What loops of a kernel take from before them that is dear, and has a place."""
    forms = Forms(kernel, launch)
    loads = [site for site in sites(kernel.body, frozenset((Code.LOAD,))) if site.block is kernel.body]
    top = frozenset(kernel.body.ops)
    found: list[Shared] = []
    taken = _taken(kernel)
    names = {value.name for value in kernel.arguments} | set(kernel.constants)
    windows = [op for op in kernel.body.ops if op.attributes.get(OF_TILES)]
    of_windows = {beneath(value, _SPREADS) for value in captured(block for op in windows for block in op.blocks)}
    for value in taken:
        op = value.producer
        if op is None or op not in top or not value.is_float or not value.shape or not _dear(value):
            continue
        wanted = "delta" if op.code is Code.SUM else f"saved_{value.name.strip('_') or _role(op)}"
        name = free_name(wanted, names | {one.pointer.name for one in found})
        for site in sorted(loads, key=lambda site: site.op.result.name != value.name):
            facts = _home(forms, value, site)
            if facts is not None:
                place, reason = site.op.base.name, f"each element of {name} is stored once"
                stated = tuple(Fact(text, reason, place) for text in facts)
                found.append(Shared(value, site.op, Value(f"*{value.element}", (), name), facts=stated))
                break
        else:
            value = wide if (wide := _wide(value)) in taken else value
            if value in of_windows or _is_controlled(value):
                found.append(Shared(value, None, Value(f"*{value.element}", (), name), _rows(forms, value)))
    return list({one.value: one for one in reversed(found)}.values())[::-1]


def _role(op: Op) -> str:
    """What a value without a name of its own is kept as."""
    made = op.operands[0].producer if op.code is Code.CAST else op
    return "tile" if made is None else _ROLES.get(made.code, "tile")


def _wide(value: Value) -> Value:
    """The value before it was rounded, which is kept once where loops take both."""
    op = value.producer
    narrowed = op is not None and op.code is Code.CAST and value.element in NARROW and op.operands[0].is_float
    return op.operands[0] if op is not None and narrowed and op.operands[0].shape == value.shape else value


def _rows(forms: Forms, value: Value) -> tuple[str, ...]:
    """The shape of memory where every program has a row for a value."""
    programs = ONE
    for count in forms.launch.grid:
        programs = programs * count
    names = forms.kernel.extents
    return (programs.text(), " * ".join(names.get(extent) or str(extent) for extent in value.shape))


def _taken(kernel: Kernel) -> list[Value]:
    """Values that loops of the kernel's own block read from before them, before these were spread, negated or compared
    with a constant."""
    found: dict[Value, None] = {}
    for loop in kernel.body.ops:
        if loop.code is not Code.FOR:
            continue
        for value in captured(loop.blocks):
            found[_compared(beneath(value, _SPREADS))] = None
    return list(found)


def _compared(value: Value) -> Value:
    """The number that a condition compares with a constant: that is what memory can keep."""
    op = value.producer
    if op is None or op.code is not Code.CMP or constant(unspread(op.operands[1])) is None:
        return value
    return beneath(op.operands[0], _SPREADS)


def _dear(value: Value) -> bool:
    """Whether computing it takes more than one load and arithmetic on that."""
    ops = {part.producer for part in computed_of(value, down_to=_is_loaded)}
    tiles = [op for op in ops if op is not None and op.code is Code.LOAD and len(op.result.shape) >= len(value.shape)]
    return len(tiles) > 1 or any(op is not None and op.code in WORK for op in ops)


def _is_controlled(value: Value) -> bool:
    """Whether a loop or a branch computes part of a value."""
    made = (part.producer for part in computed_of(value, down_to=_is_loaded))
    return any(op is not None and op.code in CONTROL for op in made)


def _is_loaded(value: Value) -> bool:
    return value.producer is not None and value.producer.code is Code.LOAD


def _home(forms: Forms, value: Value, site: Site) -> tuple[str, ...] | None:
    """Facts under which a value can be kept at the address of a load; None where it cannot.

    The address must tell programs and lanes apart, and where its mask fails the value must be zero, as it comes back.
    """
    op = site.op
    if op.offset.shape != value.shape or op.base in forms.written:
        return None
    labels = tuple(range(len(value.shape)))
    if op.mask is not None:
        parts = conjuncts(op.mask, labels)
        if not all(vanishes(value, labels, form(part, at)) for part, at in parts):
            return None
    address = forms.of(op.offset)
    within = segments(forms, site)
    found = injective(address, bounds(forms, site), domain(forms, site), forms.launch.calls, within=within)
    return None if found is None else tuple(found.facts())


def storing(kernel: Kernel, kept: Sequence[Shared], axes: int) -> Kernel:
    """The kernel, on a grid of `axes` axes, that stores the values as well."""
    return _Storing(kernel, kept, axes).copy()


def loading(kernel: Kernel, kept: Sequence[Shared], axes: int) -> Kernel:
    """The kernel, on a grid of `axes` axes, that loads the values instead of computing them."""
    return _Loading(kernel, kept, axes).copy()


def tile_of_row(b: Builder, place: Value, shape: Sequence[int], names: Mapping[int, str]) -> Value:
    """Offsets of the tile that so many others are in front of, each with its elements one behind the other."""
    for axis, extent in enumerate(shape):
        lanes = b.arange(0, extent, names.get(extent))
        for other in range(len(shape)):
            lanes = lanes if other == axis else b.expand(lanes, other)
        place = b.add(b.mul(place, b.cast(b.extent(extent), "i64")), b.cast(lanes, "i64"))
    return place


class _Sharing(Copier):
    def __init__(self, source: Kernel, kept: Sequence[Shared], axes: int, written: Sequence[Value] = ()) -> None:
        made = emptied(source, arguments=[*source.arguments, *(one.pointer for one in kept)])
        super().__init__(source, Builder(made))
        self.b.written = self.written | frozenset(written)
        self.homes = {one.value: one for one in kept}
        self.axes = axes

    def address(self, one: Shared) -> tuple[Value, Value | None]:
        """Where a value is kept, and the mask."""
        if one.place is None:
            return self.row(one.value.shape), None
        mask = one.place.mask
        return self.whole(one.place.offset), None if mask is None else self[mask]

    def row(self, shape: tuple[int, ...]) -> Value:
        """Offsets of a tile in the row of this program."""
        place = program_number(self.b, reversed(range(self.axes)))
        return tile_of_row(self.b, place, shape, self.source.extents)


class _Storing(_Sharing):
    """Stores what is shared where it is computed."""

    def __init__(self, source: Kernel, kept: Sequence[Shared], axes: int) -> None:
        super().__init__(source, kept, axes, [one.pointer for one in kept])

    def op(self, op: Op) -> None:
        super().op(op)
        for result in op.results:
            one = self.homes.get(result)
            if one is not None and not self.slicing:
                offset, mask = self.address(one)
                self.b.store(one.pointer, offset, self.whole(result), mask)


class _Loading(_Sharing):
    """Loads what is shared."""

    def op(self, op: Op) -> None:
        found = [result for result in op.results if result in self.homes]
        if len(found) < len(op.results) or not found:
            super().op(op)
        for result in found:
            one = self.homes[result]
            offset, mask = self.address(one)
            padding = None if mask is None else self.b.const(0.0, one.pointer.pointee)
            self[result] = self.b.load(one.pointer, offset, mask, padding, result.name)
