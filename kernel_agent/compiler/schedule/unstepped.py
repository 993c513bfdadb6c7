"""`unstepped`: a forward whose products step through rows in tiles, as one whose tiles have whole rows.

Logits of a head are products over the hidden axis, a tile of it at a time. What owns rows of the input would form such
products anew for every tile of its gradient. With a tile as wide as a row the forward computes the same without that
loop, and one program keeps the gradient of its rows while it goes through all that they meet.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import UNKNOWN, Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.sites import Site, mask_forms, sites
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_constant, walk

MOST_COLUMNS = 512
"""Of a row, at sizes of real work."""
OWNED, WALKED, WARPS = 64, 16, 8
"""Rows of a program and of a trip at most, and warps: sums of 64 rows of 512 columns are half of the registers that
these have, and both tiles have room in shared memory."""
_MOVES = frozenset((Code.CAST, Code.TRANS))
"""What leaves zeros where they are, between a load and a product."""
_PLACES = frozenset((Code.CONST, Code.ARANGE, Code.EXPAND, Code.FULL, Code.BROADCAST, *_MOVES))


@dataclass(frozen=True)
class WholeRows:
    """A forward with whole rows in its tiles."""

    kernel: Kernel
    calls: Calls
    tile: str
    """Constexpr: the columns of a step."""
    columns: Polynomial
    """Of a row."""
    name: str
    """The constexpr that takes the tile's place."""

    @classmethod
    def of(cls: type[Rows], kernel: Kernel, calls: Calls, tile: str, columns: Polynomial) -> Rows:
        """A kernel without the loops that step by a tile."""
        name = kernel.free_name(f"ALL_{tile.removeprefix('BLOCK_')}")
        found = cls(prune(Unstepper(kernel, tile, name).copy()), calls, tile, columns, name)
        names = tuple({**known, name: eval(found.width, dict(known))} for known in calls.names)
        return replace(found, calls=replace(calls, names=names))

    @property
    def width(self) -> str:
        """Expression of a tile that has a whole row, and no fewer columns than the forward's."""
        return f"max({self.tile}, triton.next_power_of_2({self.columns.text()}))"

    def plan(self, found: BackwardPlan) -> BackwardPlan:
        """A plan of that kernel as one of the forward's launch."""
        remark = f"a tile has a whole row of {self.columns.text()} columns"
        return replace(found, settings={self.name: self.width, **found.settings}, remarks=(*found.remarks, remark))


Rows = TypeVar("Rows", bound=WholeRows)


class Unstepped(WholeRows):
    """One whose products stepped through them."""

    def plan(self, found: BackwardPlan) -> BackwardPlan:
        """With tiles and warps that sums of whole rows have room for."""
        steps = tuple(
            replace(step, num_warps=step.num_warps or str(WARPS), most=_most(step.kernel, self.name))
            for step in found.steps
        )
        return super().plan(replace(found, steps=steps))


def unstepped(kernel: Kernel, launch: Launch) -> Unstepped | None:
    """The forward with whole rows for the tiles that products step by; None where there are none, and where rows are
    not known to be short: launches at sizes of real work must be among those that were seen."""
    calls = launch.calls
    for tile in dict.fromkeys(tile_of(op) for op in kernel.ops if op.code is Code.FOR):
        if tile not in kernel.constants or tile in kernel.fixed or not calls.entries:
            continue
        columns = summed_columns(kernel, launch, tile)
        most = None if columns is None else calls.at_work(columns.text())
        if columns is None or most is None or most > MOST_COLUMNS:
            continue
        return Unstepped.of(kernel, calls, tile, columns)
    return None


def summed_columns(kernel: Kernel, launch: Launch, tile: str) -> Polynomial | None:
    """The columns of the rows that products step through by a tile, which then may have any size; None where tiles are
    more than steps over these."""
    return Steps.columns_of(kernel, launch, tile)


def _most(kernel: Kernel, name: str) -> dict[str, int]:
    """What tiles of a kernel start with at most, beside one that has whole rows."""
    sums = [value for op in kernel.ops if op.code is Code.FOR for value in op.results]
    owned = {tile for value in sums if name in _tiles(kernel, value) for tile in _tiles(kernel, value)} - {name}
    formed = {tile for op in kernel.ops if op.code is Code.DOT for tile in _tiles(kernel, op.result)} - {name}
    return {tile: OWNED if tile in owned else WALKED for tile in sorted(owned | formed)}


def _tiles(kernel: Kernel, value: Value) -> set[str]:
    """What the extents of a value are called."""
    return {kernel.extents[extent] for extent in value.shape if extent in kernel.extents}


def tile_of(loop: Op) -> str:
    """The constexpr that a loop steps by, from 0 on; empty where it steps by something else."""
    start, _, step = loop.operands[:3]
    size = step.producer
    known = is_constant(start, 0) and size is not None and size.code is Code.CONST
    return str(size.attributes.get("symbol") or "") if known and size is not None else ""


class Steps:
    """Whether all that a kernel does with tiles of one name is to sum products over the columns of whole rows."""

    def __init__(self, forms: Forms, tile: str, extent: int, loops: Sequence[Op]) -> None:
        self.forms = forms
        self.tile = Polynomial.symbol(tile, positive=True)
        self.name = tile
        self.extent = extent
        self.loops = loops

    @classmethod
    def columns_of(cls, kernel: Kernel, launch: Launch, tile: str) -> Polynomial | None:
        """The columns of a row; None where tiles are more than steps over these."""
        forms = Forms(kernel, launch)
        extents = [size for size, name in kernel.extents.items() if name == tile]
        loops = [op for op in kernel.ops if op.code is Code.FOR and tile_of(op) == tile]
        ends = {forms.of(loop.operands[1]).invariant for loop in loops}
        (end,) = ends if len(ends) == 1 else (None,)
        if len(extents) != 1 or end is None or not end.printable or end == ZERO:
            return None
        steps = cls(forms, tile, extents[0], loops)
        inside = {op for loop in loops for op in walk(loop.blocks[0])}
        named = (
            all(map(steps._names_lanes_or_steps, kernel.ops))
            and sum(tile in names_in(n) for n in kernel.extents.values()) == 1
        )
        apart = all(steps.is_place(op) for op in kernel.ops if op not in inside and op not in loops)
        return end if named and apart and all(steps.walks(loop, end) for loop in loops) else None

    def _names_lanes_or_steps(self, op: Op) -> bool:
        """Whether an operation names the tile as the lanes of one, or the step of the loops, if it does."""
        symbol = str(op.attributes.get("symbol") or "")
        if self.name not in names_in(symbol):
            return True
        return symbol == self.name and (
            op.code is Code.ARANGE or (op.code is Code.CONST and self._only_steps(op.result))
        )

    def is_place(self, op: Op) -> bool:
        """Whether an operation outside of the loops has no tile, or is about where elements lie."""
        wide = any(self.extent in value.shape for value in (*op.operands, *op.results))
        return not wide or (not op.blocks and self.is_index(op))

    def _only_steps(self, size: Value) -> bool:
        """Whether the size of a tile is read as the step of loops alone."""
        readers = [op for op in self.forms.kernel.ops if size in op.operands]
        yielded = any(size in block.yields for op in self.forms.kernel.ops for block in op.blocks)
        steps = [op.operands[2] for op in readers if op in self.loops]
        return not yielded and sum(op.operands.count(size) for op in readers) == steps.count(size)

    def is_index(self, op: Op) -> bool:
        """Whether an operation computes places, one for each lane, or what is said of these."""
        if any(value.is_float or value.is_pointer for value in (*op.operands, *op.results)):
            return False
        if op.code is Code.ARANGE:
            return self.extent != op.result.shape[0] or (
                op.attributes["start"] == 0 and op.attributes.get("symbol") == self.name
            )
        return op.code in _PLACES or op.code in ELEMENTWISE

    def walks(self, loop: Op, end: Polynomial) -> bool:
        """Whether a loop sums products over columns, and does nothing else."""
        (block,) = loop.blocks
        carries, totals = block.arguments[1:], [value.producer for value in block.yields]
        products = {op.result for op in block.ops if op.code is Code.DOT}
        for carry, total in zip(carries, totals, strict=True):
            if total is None or total.code is not Code.ADD or carry not in total.operands:
                return False
            if not products & set(total.operands) or sum(op.operands.count(carry) for op in block.ops) > 1:
                return False
        trip, loads = self.forms.trip(loop), sites(block, frozenset((Code.LOAD,)))
        if any(op.blocks for op in block.ops) or not all(self._is_columns(site, trip, end) for site in loads):
            return False
        tiles = {site.op.result for site in loads}
        for op in block.ops:
            if op.code in _MOVES and op.operands[0] in tiles:
                tiles.add(op.result)
            elif op.code is Code.DOT:
                left, right = op.operands
                if left not in tiles or right not in tiles or not self._is_over_columns(left, right):
                    return False
            elif op.code is not Code.LOAD and op not in totals and not self.is_index(op):
                return False
        return bool(carries)

    def _is_over_columns(self, left: Value, right: Value) -> bool:
        """Whether a product sums over columns, and has none in its result."""
        return (left.shape[-1], right.shape[-2]) == (self.extent,) * 2 and self.extent not in (
            *left.shape[:-1],
            *right.shape[:-2],
            right.shape[-1],
        )

    def _is_columns(self, site: Site, trip: Atom, end: Polynomial) -> bool:
        """Whether a load gives what memory has of the columns of a row, and zeros behind the last one."""
        op = site.op
        padded = op.other is not None and is_constant(op.other, 0) and op.offset.shape == op.result.shape
        return padded and self.takes_columns(site, trip, end)

    def takes_columns(self, site: Site, trip: Atom, end: Polynomial) -> bool:
        """Whether a load or store is of the columns that there are, one for each lane."""
        op = site.op
        if op.mask is None or op.offset.shape.count(self.extent) != 1:
            return False
        if op.code is Code.LOAD and op.base in self.forms.written:
            return False
        lane = self.lane(op.offset)
        column = Form.of({trip: self.tile, lane: ONE})
        parts = mask_forms(self.forms, op.mask)
        if any(part is None or not self.is_of_columns(part, trip, lane) for part in parts):
            return False
        return column - Form(base=end) in parts and self.is_of_columns(self.forms.of(op.offset), trip, lane)

    def lane(self, value: Value) -> Atom:
        """Of the tile's axis."""
        return Atom(Kind.LANE, value.shape.index(self.extent), extent=self.tile)

    def is_of_columns(self, form: Form, trip: Atom, lane: Atom) -> bool:
        """Whether a number knows of trip and lane no more than their column."""
        taken, step = (form.coefficients.get(atom, ZERO) for atom in (trip, lane))
        rest = [(atom, number) for atom, number in form.terms if atom not in (trip, lane)]
        others = {UNKNOWN, trip, lane}
        plain = all(others.isdisjoint(atom.sources) and not self._names_tile(number) for atom, number in rest)
        plain &= not any(atom.divisor is not None and self._names_tile(atom.divisor) for atom, _ in rest)
        return plain and taken == step * self.tile and not self._names_tile(form.base) and not self._names_tile(step)

    def _names_tile(self, number: Polynomial) -> bool:
        return any(self.name in names_in(symbol.text) for symbol in number.symbols)


def names_in(text: str) -> set[str]:
    """What an expression names."""
    try:
        return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
    except SyntaxError:
        return set()


class Unstepper(Copier):
    """Copies a kernel with one step for the loops of a tile."""

    def __init__(self, source: Kernel, tile: str, name: str) -> None:
        super().__init__(source)
        self.tile = tile
        self.name = name
        made = self.b.kernel
        made.extents = {size: name if symbol == tile else symbol for size, symbol in source.extents.items()}
        made.constants = {name if known == tile else known: value for known, value in source.constants.items()}
        made.fixed = source.fixed

    def pure(self, op: Op) -> None:
        """Lanes."""
        if op.code is Code.ARANGE and op.attributes.get("symbol") == self.tile:
            self[op.result] = self.b.arange(op.attributes["start"], op.attributes["end"], self.name)
        else:
            super().pure(op)

    def loop(self, op: Op) -> None:
        """A FOR."""
        if tile_of(op) != self.tile:
            super().loop(op)
            return
        (block,) = op.blocks
        self[block.arguments[0]] = self[op.operands[0]]
        for carry, start in zip(block.arguments[1:], op.operands[3:], strict=True):
            self[carry] = self.whole(start)
        self.results(op, self.block(block))
