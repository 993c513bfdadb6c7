"""`Span`: rows `start + lane` that trips of a loop add to, from a row on that only memory knows.

Where sequences lie packed one behind the other, tiles of keys begin with their sequence, so that tiles of two lie
anywhere beside each other. What a trip adds lane by lane is added by tiles at fixed places as well, of which it meets
one or two: each lane asks whether the trip has it. That all rows lie in the tensor, one behind the other, are facts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from kernel_agent.compiler.errors import DoesNotApply
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.schedule.rasters import Lanes, lane_starts
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.ssa.value import Op, Value


@dataclass(frozen=True, eq=False)
class Span:
    """Rows that each trip of a loop adds to."""

    indices: Value
    """start + arange."""
    start: Value
    lanes: Lanes
    width: Polynomial
    """Elements from one row to the next."""
    size: Polynomial
    """Rows of a trip."""
    facts: tuple[str, ...]
    """Under which no address lies in front of its row."""

    def axis(self, op: Op) -> int:
        """Of the tile that an addition is of, along which it has these rows."""
        (axis,) = self.lanes.axes[op.offset]
        return axis


def span(forms: Forms, added: Sequence[Site], loop: Op) -> Span:
    """The rows that all of some additions of a loop are to. Raises DoesNotApply."""
    ops = loop.blocks[0].ops
    inside = frozenset(ops)
    for op in ops:
        start = next((one for one in lane_starts(op) if forms.trip(loop) in forms.reads(one)), None)
        if start is None:
            continue
        lanes = Lanes(ops, op.result)
        widths = {_width(forms, site, lanes, op.result) for site in added}
        width = next(iter(widths))
        if len(widths) == 1 and width is not None and all(_lane_by_lane(lanes, site, inside) for site in added):
            facts = dict.fromkeys(fact for site in added for fact in _beside(forms, site, lanes, op.result, width))
            return Span(op.result, start, lanes, width, _size(forms, op.result), tuple(facts))
    raise DoesNotApply("its trips add to no rows from one on that memory has")


def _width(forms: Forms, site: Site, lanes: Lanes, indices: Value) -> Polynomial | None:
    """Elements from one row of an addition to the next; None where rows are not all that its address has of them, or
    where what is beside them may be anything."""
    axes = lanes.axes.get(site.op.offset, frozenset())
    if len(axes) != 1:
        return None
    (axis,) = axes
    width = forms.of(site.op.offset).coefficients.get(Atom(Kind.LANE, axis))
    if width is None or not width.printable:
        return None
    rest = _rest(forms, site, lanes, indices, width)
    known = all(atom.kind in (Kind.PROGRAM, Kind.LANE) and number.printable for atom, number in rest.terms)
    return width if known and rest.base.printable else None


def _rest(forms: Forms, site: Site, lanes: Lanes, indices: Value, width: Polynomial) -> Form:
    """What an address has beside the rows."""
    (axis,) = lanes.axes[site.op.offset]
    return forms.of(site.op.offset) - forms.of(indices).moved(lambda _: axis).times(width)


def _beside(forms: Forms, site: Site, lanes: Lanes, indices: Value, width: Polynomial) -> list[str]:
    """Facts under which that is at least 0."""
    rest = _rest(forms, site, lanes, indices, width)
    parts = (*(number for _, number in rest.terms), rest.base)
    return [f"{part.text()} >= 0" for part in parts if not part.surely(0)]


def _size(forms: Forms, indices: Value) -> Polynomial:
    """How many rows a trip has."""
    (size,) = [atom.extent for atom, _ in forms.of(indices).terms if atom.kind is Kind.LANE]
    assert size is not None
    return size


def _lane_by_lane(lanes: Lanes, site: Site, inside: Set[Op]) -> bool:
    """Whether what is added, and whether it is, depends on the lane alone among those of a trip. `inside`: what the
    loop computes."""
    op = site.op
    stack = [op.offset, op.stored, *([] if op.mask is None else [op.mask])]
    seen: set[Value] = set()
    while stack:
        value = stack.pop()
        made = value.producer
        if value in seen or made is None or made not in inside:
            continue
        seen.add(value)
        if value in lanes.mixed or made.blocks:
            return False
        if any(lanes.axes.get(operand) for operand in made.operands) and not lanes.axes.get(value):
            return False
        stack.extend(made.operands)
    return True
