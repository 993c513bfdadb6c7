"""`unslabbed`: a forward whose programs have slabs of the columns, as one whose programs have all columns.

Columns of the values of a recurrence do not meet: slabs of them are more programs. What the slabs have in common, such
as the keys, then gets gradients from several programs. With tiles as wide as a row the forward computes the same, and
each element of these gradients has one program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from kernel_agent.compiler.plan import BackwardPlan, Fact
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.sites import Site, bounds, sites
from kernel_agent.compiler.ssa.code import ELEMENTWISE, REDUCTIONS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

MOST_COLUMNS = 128
"""Of a row, at sizes of real work: two tiles of as many rows and columns fill the registers of eight warps."""
EASY_COLUMNS, WARPS = 64, 8
"""Wider rows take so many warps."""
_ACCESSES = frozenset((Code.LOAD, Code.STORE, Code.ATOMIC_ADD))
_LANEWISE = ELEMENTWISE | _ACCESSES | {
    Code.ARANGE, Code.FULL, Code.BROADCAST, Code.EXPAND, Code.TRANS, Code.FOR, Code.WHILE, Code.IF
}  # fmt: skip
"""What computes each lane of an axis from the same lane."""
_ALONG = REDUCTIONS | {Code.ARG_MAX, Code.ARG_MIN, Code.CUMSUM, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE}
"""What mixes the lanes of one axis."""


@dataclass(frozen=True)
class Slabs:
    """Columns that programs along an axis of the grid share out."""

    axis: int
    tile: str
    """Constexpr: the columns of a program."""
    columns: Polynomial
    """Of a row, all slabs together."""
    name: str
    """The constexpr that takes the tile's place."""

    @property
    def width(self) -> str:
        """Expression of a tile that has all columns."""
        return f"max({self.tile}, triton.next_power_of_2({self.columns.text()}))"

    @property
    def fact(self) -> Fact:
        """That the forward computed all columns."""
        text = f"grid{self.axis} * {self.tile} >= {self.columns.text()}"
        return Fact(text, f"the forward's programs along axis {self.axis} have all columns")


@dataclass(frozen=True)
class Whole:
    """A forward with all columns in every program."""

    kernel: Kernel
    calls: Calls
    slabs: tuple[Slabs, ...]
    most: int
    """Columns of the widest row, at sizes of real work."""

    def plan(self, found: BackwardPlan) -> BackwardPlan:
        """A plan of that kernel as one of the forward's launch."""
        one = {f"grid{slab.axis}": "1" for slab in self.slabs}
        buffers = [
            replace(buffer, shape=tuple(one.get(text, text) for text in buffer.shape)) for buffer in found.buffers
        ]
        widths = {slab.name: slab.width for slab in self.slabs}
        remarks = [f"a program has the columns of all along axis {slab.axis} of the grid" for slab in self.slabs]
        steps = [
            replace(step, num_warps=step.num_warps or ("" if self.most <= EASY_COLUMNS else str(WARPS)))
            for step in found.steps
        ]
        return replace(
            found,
            buffers=tuple(buffers),
            steps=tuple(steps),
            settings={**widths, **found.settings},
            facts=(*(slab.fact for slab in self.slabs), *found.facts),
            remarks=(*found.remarks, *remarks),
        )


def unslabbed(kernel: Kernel, launch: Launch) -> Whole | None:
    """The forward without slabs along any axis; None where there are none, and where rows are not known to be short:
    launches at sizes of real work must be among those that were seen."""
    calls = launch.calls
    found: dict[Slabs, int] = {}
    for axis, extent in enumerate(launch.grid):
        slabs = _Columns.slabs_of(kernel, launch, axis) if extent != ONE and calls.entries else None
        most = None if slabs is None else calls.at_work(slabs.columns.text())
        if slabs is None or most is None or most > MOST_COLUMNS or calls.refute((slabs.fact.expression,)):
            continue
        found[slabs] = most
    if not found:
        return None
    names = []
    for known in calls.names:
        widths = {slab.name: eval(slab.width, dict(known)) for slab in found}
        names.append({**known, **widths, **{f"grid{slab.axis}": 1 for slab in found}})
    axes = frozenset(slab.axis for slab in found)
    whole = prune(_Widener(kernel, axes, {slab.tile: slab.name for slab in found}).copy())
    calls = replace(calls, names=tuple(names), single=calls.single | axes)
    return Whole(whole, calls, tuple(found), max(found.values()))


class _Columns:
    """Whether all that a kernel computes of a column is computed of nothing else of the slab that has it."""

    def __init__(self, forms: Forms, axis: int, tile: str, extent: int) -> None:
        self.forms = forms
        self.program = forms.program(axis)
        self.tile = Polynomial.symbol(tile, positive=True)
        self.extent = extent

    @classmethod
    def slabs_of(cls, kernel: Kernel, launch: Launch, axis: int) -> Slabs | None:
        """What programs along an axis share out; None where that is not columns alone."""
        forms = Forms(kernel, launch)
        program = forms.program(axis)
        for site in sites(kernel.body, frozenset((Code.STORE, Code.ATOMIC_ADD))):
            step = forms.of(site.op.offset).coefficients.get(program, ZERO)
            names = {symbol.text for symbol in step.symbols}
            tiles = [(size, name) for size, name in kernel.extents.items() if name in names - kernel.fixed]
            if tiles:
                ((extent, tile), *_) = tiles
                return cls(forms, axis, tile, extent).found(axis, tile)
        return None

    def found(self, axis: int, tile: str) -> Slabs | None:
        """The slabs, if they are that."""
        kernel = self.forms.kernel
        if not all(self._is_apart(op) for op in kernel.ops):
            return None
        ends = {site: self._end(site) for site in sites(kernel.body, _ACCESSES)}
        columns = {end for end in ends.values() if end is not None}
        if len(columns) != 1 or ZERO in columns or not any(map(self._has_rows, ends)):
            return None
        (end,) = columns
        name = kernel.free_name(f"ALL_{tile.removeprefix('BLOCK_')}")
        return Slabs(axis, tile, end, name) if end.printable else None

    def _is_apart(self, op: Op) -> bool:
        """Whether an operation gives the same for a column in whatever slab that is."""
        if op.code is Code.ATOMIC or (op.code is Code.NUM_PROGRAMS and op.attributes["axis"] == self.program.number):
            return False
        shapes = [value.shape for value in (*op.operands, *op.results)]
        if any(shape.count(self.extent) > 1 for shape in shapes):
            return False
        if any(self.extent in shape for shape in shapes) and not self._is_lanewise(op):
            return False
        if op.results and not op.blocks and self._passes_on(op):
            return True
        if op.code is Code.CMP and not op.operands[0].is_float:
            left, right = (self.forms.of(value) for value in op.operands)
            return self._is_of_columns(left - right, op.result.shape)
        read = [*op.operands, *(value for block in op.blocks for value in block.yields)]
        return all(value.is_pointer or self._is_of_columns(self.forms.of(value), value.shape) for value in read)

    def _is_lanewise(self, op: Op) -> bool:
        """Whether an operation does not mix columns."""
        if op.code is Code.DOT or op.code in _ALONG:
            summed: int = op.operands[0].shape[-1 if op.code is Code.DOT else op.attributes["axis"]]
            return summed != self.extent
        return op.code in _LANEWISE

    def _passes_on(self, op: Op) -> bool:
        """Whether what an operation gives has a form that tells of its operands: whoever reads it is asked."""
        return op.code not in (Code.LOAD, Code.CALL) and not any(
            value.is_float or value.element == "i1" or self._is_opaque(value) for value in op.results
        )

    def _is_opaque(self, value: Value) -> bool:
        terms = self.forms.of(value).terms
        return any(atom.kind is Kind.OPAQUE and atom.number == value.id for atom, _ in terms)

    def _is_of_columns(self, form: Form, shape: Sequence[int]) -> bool:
        """Whether a number knows of slab and lane no more than their column."""
        lane = shape.index(self.extent) if self.extent in shape else None
        step, taken = ZERO, ZERO
        for atom, coefficient in form.terms:
            if atom == self.program:
                taken = coefficient
                continue
            if self._names_tile(coefficient):
                return False
            if atom.kind is Kind.LANE and atom.number == lane:
                step = coefficient
            if atom.whole is not None and not self._is_of_columns(atom.whole, shape):
                return False
            if atom.divisor is not None and self._names_tile(atom.divisor):
                return False
        return taken == step * self.tile and not self._names_tile(form.base)

    def _names_tile(self, number: Polynomial) -> bool:
        (tile,) = self.tile.symbols
        return any(symbol == tile or tile.text in symbol.text for symbol in number.symbols)

    def _end(self, site: Site) -> Polynomial | None:
        """The columns that an access is masked by; None where it has nothing to do with columns, zero where they are
        not masked, or all slabs go to the same elements."""
        lanes = self._lanes(site)
        if not lanes:
            stored = self.extent in site.op.offset.shape and site.op.code is Code.STORE
            return ZERO if stored or site.op.code is Code.ATOMIC_ADD else None
        column = Form.of({self.program: self.tile, **dict.fromkeys(lanes, ONE)})
        return next((bound.below for bound in bounds(self.forms, site) if bound.form == column), ZERO)

    def _has_rows(self, site: Site) -> bool:
        """Whether the columns of a tile lie side by side in memory, as those of a row do."""
        return len(site.op.offset.shape) > 1 and list(self._lanes(site).values()) == [ONE]

    def _lanes(self, site: Site) -> dict[Atom, Polynomial]:
        """Lanes that are columns, in an address."""
        shape = site.op.offset.shape
        axis = shape.index(self.extent) if self.extent in shape else None
        terms = self.forms.of(site.op.offset).terms
        return {atom: step for atom, step in terms if atom.kind is Kind.LANE and atom.number == axis}


def alone(kernel: Kernel, axes: Set[int]) -> Kernel:
    """The kernel of a grid that has one program along some axes."""
    return prune(_Widener(kernel, axes, {}).copy()) if axes else kernel


class _Widener(Copier):
    """Copies a kernel for a single program along some axes, with other names for tiles."""

    def __init__(self, source: Kernel, axes: Set[int], names: Mapping[str, str]) -> None:
        super().__init__(source)
        self.axes = axes
        self.names = names
        made = self.b.kernel
        made.extents = {size: self.names.get(name, name) for size, name in source.extents.items()}
        made.constants = {self.names.get(name, name): value for name, value in source.constants.items()}
        made.fixed = source.fixed

    def pure(self, op: Op) -> None:
        """Programs and lanes."""
        if op.code is Code.PROGRAM_ID and op.attributes["axis"] in self.axes:
            self[op.result] = self.b.const(0, op.result.element)
        elif op.code is Code.NUM_PROGRAMS and op.attributes["axis"] in self.axes:
            self[op.result] = self.b.const(1, op.result.element)
        elif op.code is Code.ARANGE and op.attributes.get("symbol") in self.names:
            symbol = self.names[op.attributes["symbol"]]
            self[op.result] = self.b.arange(op.attributes["start"], op.attributes["end"], symbol)
        else:
            super().pure(op)
