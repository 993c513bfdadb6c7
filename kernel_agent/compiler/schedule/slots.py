"""`slotted`: sums that are small beside what a program reads, stored by each program to a row of its own.

Where programs that add to the same elements cannot become one program that loops (`rows`), since they end early or
keep tapes, or where all that is left is a few numbers each, their sums lie in rows of one buffer, and torch adds these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.plan import Buffer, Fact, Fill, Total
from kernel_agent.compiler.schedule.coverage import covered_if, domain
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import injective
from kernel_agent.compiler.schedule.linear import Atom, Kind
from kernel_agent.compiler.schedule.ownership import WRITES, unread_axes
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.sites import Site, bounds, sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

SMALL = 16
"""How many times the elements of a row a program has to load: a row is written, and read again, in float32."""


@dataclass(frozen=True)
class Slots:
    """The rows of one gradient."""

    tensor: str
    """The input whose gradient it is."""
    name: str
    """Of the gradient's argument."""
    axes: tuple[int, ...]
    """Of the grid: programs along these have rows of their own."""
    buffer: Buffer
    width: str
    """The argument that says how far apart rows are."""
    facts: tuple[Fact, ...]

    @property
    def total(self) -> Total:
        """What torch does."""
        return Total(self.buffer.name, self.name)


@dataclass(frozen=True)
class Slotted:
    """A kernel, some of whose additions are stores to rows."""

    kernel: Kernel
    slots: tuple[Slots, ...] = ()

    @property
    def scalars(self) -> dict[str, str]:
        """Expressions of arguments that the kernel did not have."""
        return {one.width: f"{one.tensor}.numel()" for one in self.slots}


def slotted(kernel: Kernel, gradients: Mapping[str, str], launch: Launch) -> Slotted:
    """Rows for as many of the gradients as can have them. Others stay as they are.

    `gradients`: those that are added to atomically, by name of the input's argument the name of the gradient's.
    """
    forms = Forms(kernel, launch)
    written: dict[str, list[Site]] = {}
    for site in sites(kernel.body, WRITES):
        written.setdefault(site.op.base.name, []).append(site)
    most = sum(math.prod(op.result.shape) for op in kernel.ops if op.code is Code.LOAD) // SMALL
    found = []
    for tensor, name in gradients.items():
        added = written.get(name, [])
        if kernel.argument(tensor).is_pointer and len(added) == 1 and math.prod(added[0].op.offset.shape) <= most:
            slots = _slots(forms, added[0], tensor)
            found += [slots] if slots is not None else []
    return Slotted(_Slotter(kernel, found).copy() if found else kernel, tuple(found))


def _slots(forms: Forms, site: Site, tensor: str) -> Slots | None:
    """Rows of the only addition to a gradient; None where programs do not store each element of theirs once."""
    if site.op.code is not Code.ATOMIC_ADD or site.loops:
        return None
    address, needed = forms.of(site.op.offset), domain(forms, site)
    missing = needed - address.sources
    if not missing or any(atom.kind is not Kind.PROGRAM for atom in missing):
        return None
    proof = injective(address, bounds(forms, site), needed - missing)
    if proof is None:
        return None
    axes = tuple(sorted(atom.number for atom in missing))
    name = site.op.base.name
    rows = ONE
    for axis in axes:
        rows = rows * forms.launch.grid[axis]
    own = forms.kernel.free_name(f"{name}_rows")
    buffer = Buffer(
        own, site.op.base.pointee, Fill.ZEROS, shape=(rows.text(), f"{tensor}.numel()"),
        empty_if=_empty_if(forms, site, tensor, missing),
    )  # fmt: skip
    reason = f"partial sums of {name} lie in rows of {tensor}'s elements"
    texts = (f"{tensor}.is_contiguous()", *proof.facts())
    facts = (*(Fact(text, reason, tensor) for text in texts), *unread_axes(forms.kernel, forms.launch))
    return Slots(tensor, name, axes, buffer, f"{own}_width", facts)


def _empty_if(forms: Forms, site: Site, tensor: str, missing: frozenset[Atom]) -> str:
    """When each program stores to all of its row."""
    asked = [condition for condition, _ in site.conditions]
    asked += [] if site.op.mask is None else [site.op.mask]
    if any(not forms.reads(value).isdisjoint(missing) for value in asked):
        return ""
    axes = {atom.number for atom in missing}
    grid = tuple(ONE if axis in axes else extent for axis, extent in enumerate(forms.launch.grid))
    return covered_if(Forms(forms.kernel, Launch(grid, forms.launch.scalars)), [site], tensor)


class _Slotter(Copier):
    """Stores to rows."""

    def __init__(self, source: Kernel, found: Sequence[Slots]) -> None:
        self.rows: dict[str, Value] = {}
        self.widths: dict[str, Value] = {}
        self.slots = {one.name: one for one in found}
        for name, one in self.slots.items():
            self.rows[name] = Value(source.argument(name).element, (), one.buffer.name)
            self.widths[name] = Value("i64", (), one.width)
        arguments = [self.rows.get(value.name, value) for value in source.arguments]
        super().__init__(source, Builder(emptied(source, arguments=[*arguments, *self.widths.values()])))
        self.b.written = self.written | set(self.rows.values())

    def effect(self, op: Op) -> None:
        """Additions to what has rows."""
        if self.slicing or "base" not in op.attributes or op.base.name not in self.slots:
            super().effect(op)
            return
        b = self.b
        first, *others = self.slots[op.base.name].axes
        row = b.cast(b.program_id(first), "i64")
        for axis in others:
            row = b.add(b.mul(row, b.cast(b.num_programs(axis), "i64")), b.cast(b.program_id(axis), "i64"))
        start = b.mul(row, self.widths[op.base.name])
        mask = None if op.mask is None else self[op.mask]
        b.store(self.rows[op.base.name], b.add(start, b.cast(self.whole(op.offset), "i64")), self[op.stored], mask)
