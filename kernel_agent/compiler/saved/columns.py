"""`columns_of`: what choices by the number of a lane, one after the other, put into the lanes of a tile.

`where(lane == 2, c, where(lane == 1, b, where(lane == 0, a, rest)))` is what unrolled trips leave that set a lane each.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.saved.lanes import Lanes
from kernel_agent.compiler.schedule.claims import Claim, Claims, open_claims
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import mask_forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import repeated_conjuncts
from kernel_agent.compiler.ssa.value import Op, Value, constant, unspread


@dataclass(frozen=True)
class Column:
    """A lane along an axis of a tile, and what it holds in every row."""

    value: Value | None
    """Without that axis, or with one lane along it; None of a value of another shape."""
    lanes: Value
    index: Value
    """The constant that `lanes` are compared with."""
    atom: Atom
    """That counts the lanes."""
    number: int
    """The lane's."""


@dataclass(frozen=True)
class Columns:
    """Of a tile."""

    tile: Value
    set: tuple[Column, ...]
    """Each lane once, as it is in the end."""
    rest: Value
    """What the other lanes hold."""

    @property
    def axis(self) -> int:
        """Along which they are counted."""
        return self.set[0].atom.number


def columns_of(forms: Forms, tile: Value) -> Columns | None:
    """The columns that a tile's last choices set; None where there are none."""
    found: dict[int, Column] = {}
    rest = tile
    while (op := rest.producer) is not None and op.code is Code.SELECT:
        column = _column(forms, tile, op)
        if column is None or any(other.atom != column.atom for other in found.values()):
            break
        found.setdefault(column.number, column)  # what is chosen last counts
        rest = unspread(op.operands[2])
    return Columns(tile, tuple(found.values()), rest) if found else None


def _column(forms: Forms, tile: Value, op: Op) -> Column | None:
    """What a choice puts into a lane, whatever the rows."""
    test, value = op.operands[0].producer, unspread(op.operands[1])
    if test is None or test.code is not Code.CMP or test.attributes["predicate"] != "eq":
        return None
    for lanes, index in (test.operands, test.operands[::-1]):
        number, counted = constant(unspread(index)), forms.of(lanes)
        if not isinstance(number, int) or len(lanes.shape) != len(tile.shape) or len(counted.terms) != 1:
            continue
        ((atom, step),) = counted.terms
        if atom.kind is not Kind.LANE or step != ONE or counted.base.terms:
            continue
        return Column(_row(value, tile, atom.number), lanes, unspread(index), atom, number)
    return None


def _row(value: Value, tile: Value, axis: int) -> Value | None:
    """What a tile repeats along an axis, without that if the kernel computes it so; None where that is not it all."""
    row = tuple(1 if place == axis else extent for place, extent in enumerate(tile.shape))
    if value.shape != (row if len(row) > 1 else ()):
        return None
    op = value.producer
    return op.operands[0] if op is not None and op.code is Code.EXPAND and op.attributes["axis"] == axis else value


def column_claims(forms: Forms, lanes: Lanes, columns: Columns, column: Column, mask: Value | None) -> Claims | None:
    """What has to hold for a column to be a lane of its tile, stored under a mask wherever anything depends on it; None
    where that is not known."""
    value, extent = column.value, column.atom.extent
    if value is None or extent is None or column.number < 0:
        return None
    claims = [Claim(extent, Polynomial.integer(column.number + 1))]
    axis = columns.axis if len(value.shape) < len(columns.tile.shape) else None
    for part in [] if mask is None else map(unspread, repeated_conjuncts(mask)):
        if not _is_of_rows(part, columns.axis):
            shown = _in_column(forms, part, column)
            if shown is None:
                return None
            claims += shown
        elif not lanes.confined(value, part, axis) or not (value.is_float or lanes.spared(value, part, axis)):
            return None
    return open_claims(claims)


def rest_outside(forms: Forms, lanes: Lanes, columns: Columns, mask: Value, reader: Value) -> bool:
    """Whether no column is set where a mask does not hold, but for rows that have no part in what is made of
    `reader`."""
    for part in map(unspread, repeated_conjuncts(mask)):
        if _is_of_rows(part, columns.axis):
            if not lanes.confined(reader, part):
                return False
            continue
        shown = [_in_column(forms, part, column) for column in columns.set]
        if not all(claims is not None and all(claim.proved for claim in claims) for claims in shown):
            return False
    return True


def _is_of_rows(part: Value, axis: int) -> bool:
    """Whether a condition is one for all lanes along an axis."""
    return not part.shape or part.shape[axis] == 1


def _in_column(forms: Forms, part: Value, column: Column) -> list[Claim] | None:
    """What has to hold for a condition to hold in a column; None where it asks for more than which column it is."""
    found = []
    for one in mask_forms(forms, part):
        number = None if one is None else one.at({column.atom: Polynomial.integer(column.number)}).invariant
        if number is None:
            return None
        found.append(Claim(-number, ONE))
    return found
