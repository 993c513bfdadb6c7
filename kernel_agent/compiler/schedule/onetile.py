"""`widened`: a forward that walks through each row in tiles, as one whose tile has the whole row.

Norms of long rows sum a row tile by tile, and go through it again to store what became of it. What all rows add to the
gradient of a weight has no place in registers then, since each trip has other columns. With a tile as wide as a row the
forward computes the same without these loops, and few programs keep such sums while they go through the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.onetrip import LONGEST
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Site, mask_forms, sites
from kernel_agent.compiler.schedule.unstepped import Steps, Unstepper, tile_of, width_of
from kernel_agent.compiler.schedule.zeros import Zeros
from kernel_agent.compiler.ssa.code import ELEMENTWISE, MEMORY, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, bare, is_constant

_KEEPS = ELEMENTWISE | {Code.EXPAND, Code.BROADCAST, Code.FULL}
"""What has each column where its operands have it."""


@dataclass(frozen=True)
class Widened:
    """A forward with a whole row in its tile."""

    kernel: Kernel
    calls: Calls
    width: str
    """Expression of the tile."""
    columns: str
    """Expression of the columns of a row."""
    name: str
    """The constexpr that takes the tile's place."""

    def plan(self, found: BackwardPlan) -> BackwardPlan:
        """A plan of that kernel as one of the forward's launch."""
        remark = f"a tile has a whole row of {self.columns} columns"
        return replace(found, settings={self.name: self.width, **found.settings}, remarks=(*found.remarks, remark))


def widened(kernel: Kernel, launch: Launch) -> Widened | None:
    """The forward with a whole row for the tile that it walks through rows by; None where it does something else with a
    tile than that, and where a row is not known to fit one at sizes of real work, or at those of SWEEP."""
    calls = launch.calls
    for tile in dict.fromkeys(tile_of(op) for op in kernel.ops if op.code is Code.FOR):
        if tile not in kernel.constants or tile in kernel.fixed:
            continue
        columns = Walk.columns_of(kernel, launch, tile)
        most = None if columns is None else calls.asked(columns.text())
        if columns is None or most is None or most > LONGEST:
            continue
        name, width = kernel.free_name(f"ALL_{tile.removeprefix('BLOCK_')}"), width_of(tile, columns)
        names = [{**known, name: eval(width, dict(known))} for known in calls.names]
        made = prune(Unstepper(kernel, tile, name).copy())
        return Widened(made, replace(calls, names=tuple(names)), width, columns.text(), name)
    return None


class Walk(Steps):
    """Whether all that a kernel does with tiles of one name is to walk through the columns of a row.

    A trip loads and stores columns, and computes each of what it has of that column and of numbers of the row. What it
    leaves to later trips, and to what comes behind them, are sums over all columns.
    """

    def __init__(self, forms: Forms, tile: str, extent: int, loops: Sequence[Op]) -> None:
        super().__init__(forms, tile, extent, loops)
        self.zeros = Zeros(forms)

    def is_place(self, op: Op) -> bool:
        """Whether an operation outside of the loops has no tile, or begins or ends a sum that lanes have parts of."""
        if super().is_place(op):
            return True
        if op.code is Code.FULL:
            return is_constant(op.operands[0], 0)
        made = op.operands[0].producer if op.code is Code.SUM else None
        return made in self.loops and self._axis(op.operands[0]) == op.attributes["axis"]

    def walks(self, loop: Op, end: Polynomial) -> bool:
        """Whether a loop does no more than that."""
        (block,) = loop.blocks
        memory = [site for site in sites(block, MEMORY) if site.block is block]
        trip = self.forms.trip(loop)
        touched = [site for site in memory if site.op.code in (Code.LOAD, Code.STORE)]
        if any(op.blocks for op in block.ops) or len(touched) < sum(op.code in MEMORY for op in block.ops):
            return False
        if not all(self._takes_columns(site, trip, end) for site in touched):
            return False
        masks = [site.op.mask for site in touched if site.op.mask is not None]
        totals = self._totals(loop, block, masks)
        return totals is not None and self._by_columns(block, trip, totals)

    def _takes_columns(self, site: Site, trip: Atom, end: Polynomial) -> bool:
        """Whether a load or store is of the columns that there are, one for each lane."""
        op, shape = site.op, site.op.offset.shape
        if op.mask is None or shape.count(self.extent) != 1:
            return False
        if op.code is Code.LOAD and op.base in self.forms.written:
            return False
        lane = self._lane(op.offset)
        parts = mask_forms(self.forms, op.mask)
        if any(part is None or not self.is_of_columns(part, trip, lane) for part in parts):
            return False
        column = Form.of({trip: self.tile, lane: ONE})
        return column - Form(base=end) in parts and self.is_of_columns(self.forms.of(op.offset), trip, lane)

    def _totals(self, loop: Op, block: Block, masks: Sequence[Value]) -> set[Op] | None:
        """What makes the sums that a loop carries; None where it carries something else."""
        found: set[Op] = set()
        for start, carry, total in zip(loop.operands[3:], block.arguments[1:], block.yields, strict=True):
            op = total.producer
            if op is None or op.code is not Code.ADD or carry not in op.operands:
                return None
            if sum(other.operands.count(carry) for other in block.ops) > 1 or op.operands[0] is op.operands[1]:
                return None
            (part,) = (value for value in op.operands if value is not carry)
            found.add(op)
            if self.extent in carry.shape:
                if not is_constant(bare(start), 0):
                    return None
            else:
                made = part.producer
                if made is None or made.code is not Code.SUM or self._axis(made.operands[0]) != made.attributes["axis"]:
                    return None
                if sum(other.operands.count(part) for other in block.ops) > 1 or part in block.yields:
                    return None
                found.add(made)
                part = made.operands[0]
            if not any(self.zeros.confines(part, mask) for mask in masks if mask.shape == part.shape):
                return None
        return found

    def _by_columns(self, block: Block, trip: Atom, totals: set[Op]) -> bool:
        """Whether all else of a trip is computed column by column."""
        columns: set[Value] = set()
        for op in block.ops:
            if op.code is Code.LOAD:
                columns.add(op.result)
            elif op.code is Code.STORE:
                if op.stored not in columns and not self._is_of_row(op.stored):
                    return False
            elif self.is_index(op):
                continue
            elif op in totals:
                wide = [value for value in op.operands if self.extent in value.shape and value not in block.arguments]
                if not all(value in columns for value in wide):
                    return False
            elif op.code not in _KEEPS or not all(self._is_column(value, columns, trip) for value in op.operands):
                return False
            else:
                columns.add(op.result)
        return True

    def _is_column(self, value: Value, columns: set[Value], trip: Atom) -> bool:
        """Whether a lane of a value is of its column, or the value one of the row."""
        if value in columns or self._is_of_row(value):
            return True
        if value.is_float or self.extent not in value.shape:
            return False
        lane = self._lane(value)
        if value.element != "i1":
            return self.is_of_columns(self.forms.of(value), trip, lane)
        return all(part is not None and self.is_of_columns(part, trip, lane) for part in mask_forms(self.forms, value))

    def _is_of_row(self, value: Value) -> bool:
        """Whether a value is known before the loops, or is made of such values alone, and has no columns."""
        return value.depth == 0 and self.extent not in value.shape

    def _lane(self, value: Value) -> Atom:
        return Atom(Kind.LANE, value.shape.index(self.extent), extent=self.tile)

    def _axis(self, value: Value) -> int | None:
        return value.shape.index(self.extent) if value.shape.count(self.extent) == 1 else None
