"""`slotted`: sums of programs, and of additions at several places, stored to rows of their own, which torch adds.

Where programs that add to the same elements cannot become one program that loops (`rows`), since they end early or
keep tapes, or where all that is left is a few numbers each, their sums lie in rows of one buffer. Rows may be many
where they are small beside what a program reads. Large ones take no zeros, and their sum has one order, but they are
memory that grows with their number. They are had where that is fixed, or where the launch moves as much memory of its
programs' own anyway, as the states of a recurrence that the programs of some columns each keep on a tape.

Additions at several places may be to elements of different programs: tile (i, j) adds to row sums by i, to column sums
by j. Each place then has as many rows as programs add to the same elements there, and these together fill a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.plan import Buffer, Fact, Fill, Total
from kernel_agent.compiler.reverse.early import FREED
from kernel_agent.compiler.schedule.coverage import covered_if, domain
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import injective
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.ownership import WRITES, Common, unread_axes
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial, ceiling, product
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.programs import program_count, program_number
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

SMALL = 16
"""How many times the elements of a row a program has to load: a row is written, and read again, in float32."""
FEW = 16
"""Rows that are not small, in calls that were seen: those are of small sizes, and say nothing of memory at others."""
_MOVES = frozenset((Code.LOAD, Code.STORE))


@dataclass(frozen=True)
class Wrap:
    """A remainder of a program's number in an address: programs that differ in the quotient add to the same elements,
    as images do to the channel `pid % C`."""

    op: Op
    quotient: Atom
    count: Polynomial
    """The quotient is less than this."""

    @property
    def axis(self) -> int:
        """Of the grid."""
        assert self.quotient.whole is not None
        return self.quotient.whole.terms[0][0].number


@dataclass(frozen=True)
class Slots:
    """The rows of one gradient."""

    tensor: str
    """The input whose gradient it is."""
    name: str
    """Of the gradient's argument."""
    axes: tuple[int, ...]
    """Of the grid: programs along these have rows of their own."""
    wraps: tuple[Wrap, ...]
    """Programs that these tell apart have rows of their own, too."""
    places: tuple[Op, ...]
    """Additions that have rows of their own, one behind the other; empty where one row takes all of a program's."""
    apart: tuple[tuple[int, ...], ...]
    """Axes of the grid, for each of the places, where they are not the same for all; empty where they are `axes`."""
    wide: bool
    """Rows are not small."""
    buffer: Buffer
    width: str
    """The argument that says how far apart rows are."""
    facts: tuple[Fact, ...]

    @property
    def total(self) -> Total:
        """What torch does."""
        return Total(self.buffer.name, self.name, self.wide)


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
    moved = _Moved(forms)
    written: dict[str, list[Site]] = {}
    for site in sites(kernel.body, WRITES):
        written.setdefault(site.op.base.name, []).append(site)
    loaded = loaded_around(kernel)
    found = []
    for tensor, name in gradients.items():
        added = written.get(name, [])
        if kernel.argument(tensor).is_pointer and added:
            small = all(is_small(forms, site, loaded.get(site.loops, [])) for site in added)
            slots = _slots(forms, added, tensor, moved, wide=not small)
            found += [slots] if slots is not None else []
    return Slotted(_Slotter(kernel, found).copy() if found else kernel, tuple(found))


def _lanes(site: Site) -> int:
    return math.prod(site.op.offset.shape)


def is_small(forms: Forms, added: Site, loads: Sequence[Site]) -> bool:
    """Whether an addition has few elements beside what is loaded around it: at the tiles that the kernel was lowered
    for, and at those of all calls together, of which large ones weigh most. The first entry of a sweep may have odd
    tiles."""
    if SMALL * _lanes(added) > sum(map(_lanes, loads)):
        return False
    calls = forms.launch.calls
    row = calls.total(_tile(forms, added).text())
    return row is None or SMALL * row <= (calls.total(" + ".join(_tile(forms, one).text() for one in loads)) or 0)


def _tile(forms: Forms, site: Site) -> Polynomial:
    """Lanes of an access, as the source calls their numbers."""
    extents = {atom.number: atom.extent for atom, _ in forms.of(site.op.offset).terms if atom.kind is Kind.LANE}
    found = ONE
    for axis, size in enumerate(site.op.offset.shape):
        found = found * (extents.get(axis) or Polynomial.integer(size))
    return found


def loaded_around(kernel: Kernel) -> dict[tuple[Op, ...], list[Site]]:
    """Loads within some loops."""
    found: dict[tuple[Op, ...], list[Site]] = {}
    for site in sites(kernel.body, frozenset((Code.LOAD,))):
        for depth in range(len(site.loops) + 1):
            found.setdefault(site.loops[:depth], []).append(site)
    return found


def _slots(forms: Forms, written: Sequence[Site], tensor: str, moved: _Moved, *, wide: bool) -> Slots | None:
    """Rows of all additions to a gradient; None where programs do not store each element of theirs once."""
    if any(site.op.code is not Code.ATOMIC_ADD or _repeats(site) for site in written):
        return None
    common = Common.of(forms, written)
    parts = [common] if common is not None else [Common.alone(forms, site) for site in written]
    groups = [written] if common is not None else [[site] for site in written]
    wraps = tuple(dict.fromkeys(wrap for part in parts for wrap in _wraps(forms, part.form)))
    missing = frozenset(
        atom
        for part, group in zip(parts, groups, strict=True)
        for site in group
        for atom in domain(forms, site) - part.form.sources
    )
    if len(parts) == 1 and not missing and not wraps:
        return None
    if (len(parts) > 1 and wraps) or any(atom.kind is not Kind.PROGRAM for atom in missing):
        return None
    quotients = frozenset(wrap.quotient for wrap in wraps)
    lacking = [domain(forms, group[0]) - part.form.sources for part, group in zip(parts, groups, strict=True)]
    asked = _apart_if(forms, parts, groups, lacking, quotients)
    if asked is None:
        lacking = [missing for _ in parts]
        asked = _apart_if(forms, parts, groups, lacking, quotients)
    if asked is None:
        return None
    axes = tuple(sorted(atom.number for atom in missing))
    each = tuple(tuple(sorted(atom.number for atom in own)) for own in lacking)
    name = written[0].op.base.name
    rows = Polynomial()
    for some in each:
        rows = rows + product(forms.launch.grid[axis] for axis in some)
    rows = rows * product(wrap.count for wrap in wraps)
    if wide and not forms.launch.calls.show((f"{rows.text()} <= {FEW}",)):
        return None
    own_name = forms.kernel.free_name(f"{name}_rows")
    wholes = [_empty_if(forms, group, tensor, own) for group, own in zip(groups, lacking, strict=True)]
    full = "" if wraps else _all_of(wholes)
    fixed = (Polynomial.integer(FEW) - rows).likely(0)
    if wide and not fixed and not (_is_full(forms, full) and all(moved.as_much(site) for site in written)):
        return None
    shape = (rows.text(), f"{tensor}.numel()")
    buffer = Buffer(own_name, written[0].op.base.pointee, Fill.ZEROS, shape=shape, empty_if=full)
    reason = f"partial sums of {name} lie in rows of {tensor}'s elements"
    texts = (f"{tensor}.is_contiguous()", *asked)
    if forms.launch.calls.refute(texts):
        return None
    facts = (*(Fact(text, reason, tensor) for text in texts), *unread_axes(forms.kernel, forms.launch))
    places = tuple(site.op for site in written) if len(parts) > 1 else ()
    apart = each if set(each) != {axes} else ()
    return Slots(tensor, name, axes, wraps, places, apart, wide, buffer, f"{own_name}_width", facts)


def _apart_if(
    forms: Forms,
    parts: Sequence[Common],
    groups: Sequence[Sequence[Site]],
    lacking: Sequence[frozenset[Atom]],
    quotients: frozenset[Atom],
) -> dict[str, None] | None:
    """Facts under which each place stores to no element twice, if what it lacks has rows; None where there are none."""
    asked: dict[str, None] = {}
    for part, group, own in zip(parts, groups, lacking, strict=True):
        told = domain(forms, group[0]) - own
        beside = quotients | (own if len(parts) > 1 else frozenset())
        proof = injective(part.form, part.bounds, told | part.copies, forms.launch.calls, beside, part.within)
        if proof is None:
            return None
        asked |= dict.fromkeys(proof.facts())
    return asked


def _is_full(forms: Forms, empty_if: str) -> bool:
    """Whether programs store to all of their rows: what lies in rows is as much as they store."""
    return bool(empty_if) and not forms.launch.calls.refute((empty_if,))


class _Moved:
    """What a launch loads and stores once, each element by one lane of one program."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._sites = sites(forms.kernel.body, _MOVES)
        self._apart: dict[Op, bool] = {}

    def as_much(self, added: Site) -> bool:
        """Whether for each lane of an addition the launch loads or stores another element that nothing else of it does.

        What a mask keeps from memory does not count, unless it keeps the addition as well; what a tape would hold that
        was spared does. Loops run at least once.
        """
        wanted, moved = _lanes(added), added.op.attributes.get(FREED, 0)
        for site in self._sites:
            if moved >= wanted:
                return True
            everywhere = site.loops[: len(added.loops)] == added.loops and set(site.conditions) <= set(added.conditions)
            if everywhere and (site.op.mask is None or site.op.mask is added.op.mask):
                moved += _lanes(site) if self._is_apart(site) else 0
        return bool(moved >= wanted)

    def _is_apart(self, site: Site) -> bool:
        """Whether no two programs, trips or lanes have the same element. A tape may be used again in other trips."""
        if site.op not in self._apart:
            self._apart[site.op] = self._found_apart(site)
        return self._apart[site.op]

    def _found_apart(self, site: Site) -> bool:
        forms = self._forms
        told = domain(forms, site)
        address = Common.alone(forms, site)
        if site.op.base in forms.written:
            told = frozenset(atom for atom in told if atom.kind is not Kind.TRIP or atom in address.form.sources)
        if not told <= address.form.sources:
            return False
        return injective(address.form, address.bounds, told, forms.launch.calls, within=address.within) is not None


def _repeats(site: Site) -> bool:
    """Whether it is not known how often an addition is done."""
    return any(loop.code is not Code.FOR for loop in site.loops)


def _all_of(conditions: Iterable[str]) -> str:
    """All of some conditions; empty where one is not known."""
    texts = list(dict.fromkeys(conditions))
    return "" if "" in texts else " and ".join(texts)


def _wraps(forms: Forms, address: Form) -> tuple[Wrap, ...]:
    """Of remainders of one program number whose quotients the address does not have."""
    found: dict[Atom, Wrap] = {}
    atoms = address.coefficients
    for op in forms.kernel.ops:
        terms = forms.of(op.result).terms if op.code is Code.REM and not op.result.shape else ()
        atom = terms[0][0] if len(terms) == 1 else None
        if atom is None or atom not in atoms or atom.whole is None or atom.divisor is None:
            continue
        inner = atom.whole.terms[0][0]
        quotient = Atom(Kind.QUOTIENT, 0, atom.whole, atom.divisor)
        alone = inner.kind is Kind.PROGRAM and atom.whole == Form.of({inner: ONE})
        if alone and inner.extent is not None and quotient not in atoms:
            found.setdefault(atom, Wrap(op, quotient, ceiling(inner.extent, atom.divisor)))
    return tuple(found.values())


def _empty_if(forms: Forms, written: Sequence[Site], tensor: str, missing: frozenset[Atom]) -> str:
    """When each program stores to all of its row."""
    asked = [condition for site in written for condition, _ in site.conditions]
    asked += [site.op.mask for site in written if site.op.mask is not None]
    if any(not forms.reads(value).isdisjoint(missing) for value in asked):
        return ""
    axes = {atom.number for atom in missing}
    grid = tuple(ONE if axis in axes else extent for axis, extent in enumerate(forms.launch.grid))
    return covered_if(Forms(forms.kernel, replace(forms.launch, grid=grid)), written, tensor)


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
        slots = self.slots[op.base.name]
        if slots.apart:
            row = self._behind(slots, slots.places.index(op))
        else:
            row = program_number(b, slots.axes)
        for wrap in slots.wraps:
            whole, divisor = (b.cast(self[value], "i64") for value in wrap.op.operands)
            programs = b.cast(b.num_programs(wrap.axis), "i64")
            count = b.elementwise(Code.FLOORDIV, (b.add(programs, b.sub(divisor, b.const(1, "i64"))), divisor))
            row = b.add(b.mul(row, count), b.elementwise(Code.FLOORDIV, (whole, divisor)))
        if slots.places and not slots.apart:
            row = b.add(b.mul(row, b.const(len(slots.places), "i64")), b.const(slots.places.index(op), "i64"))
        start = b.mul(row, self.widths[op.base.name])
        mask = None if op.mask is None else self[op.mask]
        b.store(self.rows[op.base.name], b.add(start, b.cast(self.whole(op.offset), "i64")), self[op.stored], mask)

    def _behind(self, slots: Slots, place: int) -> Value:
        """The row of this program behind all rows of the places before."""
        b = self.b
        row = program_number(b, slots.apart[place])
        for axes in slots.apart[:place]:
            row = b.add(row, program_count(b, axes))
        return row
