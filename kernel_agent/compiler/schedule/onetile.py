"""`widened`: a forward that walks through each row in tiles, as one whose tile has the whole row.

Norms of long rows sum a row tile by tile, and go through it again to store what became of it. What all rows add to the
gradient of a weight has no place in registers then, since each trip has other columns. With a tile as wide as a row the
forward computes the same without these loops, and few programs keep such sums while they go through the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom
from kernel_agent.compiler.schedule.onetrip import LONGEST
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.sites import mask_forms, sites
from kernel_agent.compiler.schedule.unstepped import Steps, WholeRows, tile_of
from kernel_agent.compiler.schedule.zeros import Zeros
from kernel_agent.compiler.ssa.code import ELEMENTWISE, MEMORY, Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, bare, is_constant

_KEEPS = ELEMENTWISE | {Code.EXPAND, Code.BROADCAST, Code.FULL}
"""What has each column where its operands have it."""


def widened(kernel: Kernel, launch: Launch) -> WholeRows | None:
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
        return WholeRows.of(kernel, calls, tile, columns)
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
        memory, trip = sites(block, MEMORY), self.forms.trip(loop)
        if any(op.blocks for op in block.ops) or any(site.op.code not in (Code.LOAD, Code.STORE) for site in memory):
            return False
        if not all(self.takes_columns(site, trip, end) for site in memory):
            return False
        masks = [site.op.mask for site in memory if site.op.mask is not None]
        totals = self._totals(loop, block, masks)
        return totals is not None and self._by_columns(block, trip, totals)

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
        lane = self.lane(value)
        if value.element != "i1":
            return self.is_of_columns(self.forms.of(value), trip, lane)
        return all(part is not None and self.is_of_columns(part, trip, lane) for part in mask_forms(self.forms, value))

    def _is_of_row(self, value: Value) -> bool:
        """Whether a value is known before the loops, or is made of such values alone, and has no columns."""
        return value.depth == 0 and self.extent not in value.shape

    def _axis(self, value: Value) -> int | None:
        return value.shape.index(self.extent) if value.shape.count(self.extent) == 1 else None
