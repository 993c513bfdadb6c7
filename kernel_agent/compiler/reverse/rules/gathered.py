"""Elements of a tile that its other elements pick: `tl.gather`.

Every element gets the sum of the cotangents of its readers. Who they are takes a comparison of all indices with all
places, N * N of them for a row of N, unless the indices can be turned around: where each element has one reader, as
behind `lane ^ 4`, `(lane + s) & (N - 1)` and `s - lane`, the cotangent is gathered as the elements were; where lanes
are moved by some places and the ends are read again, `max(lane - 1, 0)`, it is moved back.
"""

from __future__ import annotations

from kernel_agent.compiler.reverse.elements import index_along, last_along, moved_along
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, bare, beneath, constant, is_constant

_VEILS = (Code.BROADCAST, Code.FULL, Code.CAST)
_STARTS = frozenset((("gt", 0), ("ge", 1), ("ne", 0)))
"""Comparisons of a lane with a number that hold for all lanes but the first."""


@rule(Code.GATHER, mixes=True)
def _gather(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    source, index = op.operands
    if index.shape != source.shape:
        return _compared(b, op, primal, g), None
    g = b.whole(g, op.result.shape)
    places = _Places(b, op, primal)
    turned = places.turned()
    if turned is not None:
        axis = op.attributes["axis"]
        return b.pure(Code.GATHER, (g, b.whole(turned, index.shape)), g.element, g.shape, {"axis": axis}), None
    back = places.moved_back(g)
    return _compared(b, op, primal, g) if back is None else back, None


def _compared(b: Builder, op: Op, primal: Primal, g: Value) -> Value:
    """The sum of what each place is read for, whatever the indices."""
    axis, source = op.attributes["axis"], op.operands[0]
    picked = b.whole(primal(op.operands[1]), op.operands[1].shape)
    place = b.expand(index_along(b, source.shape, axis), axis + 1)
    hit = b.compare("eq", place, b.cast(b.expand(picked, axis), "i32"))
    parts = b.select(hit, b.expand(b.whole(g, op.result.shape), axis), b.zero(g))
    return b.sum(parts, axis + 1)


class _Places:
    """Indices of a gather, as functions of the lane along its axis.

    That the forward's indices are places of its tile is taken for granted: the gather is undefined elsewhere.
    """

    def __init__(self, b: Builder, op: Op, primal: Primal) -> None:
        self.b, self.primal = b, primal
        self.axis = op.attributes["axis"]
        self.index = op.operands[1]
        self.shape = self.index.shape

    def turned(self) -> Value | None:
        """The one reader of each place; None where that is not known to be one."""
        index = beneath(self.index, _VEILS)
        op = index.producer
        if op is None or len(op.operands) != 2:
            return None
        a, c = op.operands
        if op.code is Code.XOR and self._lane_beside(a, c) is not None:
            return self.primal(index)
        if op.code is Code.SUB and self._is_fixed(a) and self._is_lane(c):
            return self.primal(index)
        if op.code is Code.AND:
            around, last = (a, c) if self._is_last(c) else (c, a)
            return self._around(around, index) if self._is_last(last) else None
        return None

    def _around(self, place: Value, index: Value) -> Value | None:
        """The reader where a place is counted around: the extent is a power of two, as all of Triton's are."""
        op = beneath(place, _VEILS).producer
        if op is None or op.code not in (Code.ADD, Code.SUB):
            return None
        a, c = op.operands
        if op.code is Code.SUB and self._is_fixed(a) and self._is_lane(c):
            return self.primal(index)
        by = self._lane_beside(a, c) if op.code is Code.ADD else c if self._is_lane(a) and self._is_fixed(c) else None
        if by is None:
            return None
        b, lane, step = self.b, self._lane(), self.b.cast(self.primal(by), "i32")
        back = b.sub(lane, step) if op.code is Code.ADD else b.add(lane, step)
        return b.elementwise(Code.AND, (back, last_along(b, self.shape, self.axis)))

    def moved_back(self, g: Value) -> Value | None:
        """The cotangents of lanes that read the one before them, or the one behind, and the first or the last itself;
        None for other indices."""
        op = beneath(self.index, _VEILS).producer
        if op is None or op.code not in (Code.MAX, Code.MIN):
            return None
        by, (place, bound) = (-1 if op.code is Code.MAX else 1), op.operands
        if constant(bare(place)) is not None:
            place, bound = bound, place
        ends = is_constant(bare(bound), 0) if by < 0 else self._is_last(bound)
        if not ends or not self._is_next(place, by):
            return None
        b, lane = self.b, self._lane()
        first, last = b.const(0), last_along(b, self.shape, self.axis)
        end, other = (first, last) if by < 0 else (last, first)
        back = b.select(b.compare("eq", lane, other), b.zero(g), moved_along(b, g, self.axis, -by))
        if self._is_zero_at(g, by):
            return back
        return b.add(back, b.select(b.compare("eq", lane, end), g, b.zero(g)))

    def _is_next(self, place: Value, by: int) -> bool:
        """Whether a place is that of the lane, plus one or minus one."""
        op = beneath(place, _VEILS).producer
        if op is None or op.code not in (Code.ADD, Code.SUB):
            return False
        step = self._lane_beside(*op.operands) if op.code is Code.ADD else op.operands[1]
        if step is None or not (op.code is Code.ADD or self._is_lane(op.operands[0])):
            return False
        return is_constant(bare(step), by if op.code is Code.ADD else -by)

    def _is_zero_at(self, g: Value, by: int) -> bool:
        """Whether a cotangent is zero at the first lane, or at the last, as where the user masked the end."""
        op = g.producer
        if op is None or op.code is not Code.SELECT or not is_constant(bare(op.operands[2]), 0.0):
            return False
        test = beneath(op.operands[0], _VEILS).producer
        if test is None or test.code is not Code.CMP or not self._is_lane(test.operands[0]):
            return False
        predicate, bound = test.attributes["predicate"], test.operands[1]
        if by < 0:
            return (predicate, constant(bare(bound))) in _STARTS
        return predicate in ("lt", "ne") and self._is_last(bound)

    def _lane(self) -> Value:
        return index_along(self.b, self.shape, self.axis)

    def _lane_beside(self, a: Value, c: Value) -> Value | None:
        """The other one, if one of two values is the lane, and the other the same for all lanes."""
        for one, other in ((a, c), (c, a)):
            if self._is_lane(one) and self._is_fixed(other):
                return other
        return None

    def _is_fixed(self, value: Value) -> bool:
        return not value.shape or value.shape[self.axis] == 1

    def _is_lane(self, value: Value) -> bool:
        """Whether a value is the index along the axis, 0, 1, ..., without anything added."""
        axis = self.axis
        value = beneath(value, _VEILS)
        while value.producer is not None and value.producer.code is Code.EXPAND:
            one = value.producer.attributes["axis"]
            if one == axis:
                return False
            axis -= one < axis
            value = beneath(value.producer.operands[0], _VEILS)
        op = value.producer
        if op is None or op.code is not Code.ARANGE or op.attributes["start"]:
            return False
        return axis == 0 and value.shape == (self.shape[self.axis],)

    def _is_last(self, value: Value) -> bool:
        """Whether a value is the last place, by the name that the extent has."""
        op, last = bare(value).producer, last_along(self.b, self.shape, self.axis).producer
        if op is None or last is None or op.code is not Code.CONST or op.attributes.get("open"):
            return False
        return all(op.attributes[key] == last.attributes[key] for key in ("value", "symbol"))
