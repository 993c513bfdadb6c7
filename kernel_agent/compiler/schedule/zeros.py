"""`Zeros`: where a value is zero because the lanes it was made from were masked."""

from __future__ import annotations

from collections.abc import Callable

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Kind
from kernel_agent.compiler.schedule.sites import Bound, mask_bounds, whole_bounds
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, is_constant, unspread

Known = frozenset[Bound] | None
"""Bounds outside of each of which a value is zero; None of what is zero everywhere."""

MOST_ROUNDS = 8
"""In which a carry's bounds are sought; each takes some away."""


class Zeros:
    """Of one kernel. What is not finite is taken to be finite: zero times infinity is no gradient."""

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self._assumed: dict[int, Known] = {}
        """Carries of loops under study."""
        self._found: dict[int, Known] = {}
        """What was found under what is assumed: values are read several times each."""

    def outside(self, value: Value) -> Known:
        """The bounds outside of each of which `value` is zero, as seen from its axes."""
        if value.id in self._assumed:
            return self._assumed[value.id]
        if value.id not in self._found:
            self._found[value.id] = self._of(value)
        return self._found[value.id]

    def confines(self, value: Value, mask: Value) -> bool:
        """Whether a value is zero wherever a mask of its lanes does not hold."""
        parts, known = whole_bounds(self.forms, mask), self.outside(value)
        return known is None or (parts is not None and all(bound in known for bound in parts))

    def _of(self, value: Value) -> Known:
        op = value.producer
        if op is None:
            loop = self.forms.loops.get(value.id)
            carried = loop is not None and loop.code is Code.FOR and value in loop.blocks[0].arguments[1:]
            return self._carried(loop, loop.blocks[0].arguments.index(value) - 1) if loop and carried else frozenset()
        if is_constant(value, 0):
            return None
        rule = _RULES.get(op.code)
        if op.code is Code.FOR:
            return self._carried(op, op.results.index(value))
        return rule(self, op) if rule else frozenset()

    def _carried(self, loop: Op, place: int) -> Known:
        """Of what a loop carries, and gives in the end: zero where it was before and stays."""
        (block,) = loop.blocks
        inner = block.arguments[1 + place]
        trip = self.forms.trip(loop)
        found = self.outside(loop.operands[3 + place])
        for _ in range(MOST_ROUNDS):
            known, self._found = self._found, {}
            self._assumed[inner.id] = found
            after = _both(found, self.outside(block.yields[place]))
            del self._assumed[inner.id]
            self._found = known
            if after is not None:
                after = frozenset(b for b in after if trip not in b.form.sources)
            if after == found:
                return found
            found = after
        return frozenset()

    def _same(self, op: Op) -> Known:
        return self.outside(op.operands[0])

    def _product(self, op: Op) -> Known:
        return _either(self.outside(op.operands[0]), self.outside(op.operands[1]))

    def _sum(self, op: Op) -> Known:
        return _both(self.outside(op.operands[0]), self.outside(op.operands[1]))

    def _select(self, op: Op) -> Known:
        condition, then, other = op.operands
        chosen = self.outside(then)
        if is_constant(unspread(other), 0):
            return _either(chosen, frozenset(mask_bounds(self.forms, condition)))
        return _both(chosen, self.outside(other))

    def _load(self, op: Op) -> Known:
        if op.mask is None or op.other is None or not is_constant(unspread(op.other), 0):
            return frozenset()
        return frozenset(mask_bounds(self.forms, op.mask))

    def _expand(self, op: Op) -> Known:
        axis = op.attributes["axis"]
        return _moved(self.outside(op.operands[0]), lambda old: old + (old >= axis))

    def _trans(self, op: Op) -> Known:
        return _moved(self.outside(op.operands[0]), op.attributes["order"].index)

    def _reduced(self, op: Op) -> Known:
        axis = op.attributes["axis"]
        kept = _off_axis(self.outside(op.operands[0]), axis)
        return _moved(kept, lambda old: old - (old > axis))

    def _dot(self, op: Op) -> Known:
        rank = len(op.result.shape)
        left, right = (self.outside(operand) for operand in op.operands)
        return _either(_off_axis(left, rank - 1), _off_axis(right, rank - 2))


def _both(one: Known, other: Known) -> Known:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _either(one: Known, other: Known) -> Known:
    return None if one is None or other is None else one | other


def _moved(known: Known, axis_of: Callable[[int], int]) -> Known:
    return None if known is None else frozenset(Bound(b.form.moved(axis_of), b.below) for b in known)


def _off_axis(known: Known, axis: int) -> Known:
    """Bounds that say nothing of lanes along an axis, which is summed over."""
    if known is None:
        return None
    return frozenset(b for b in known if all(a.kind is not Kind.LANE or a.number != axis for a in b.form.sources))


_RULES: dict[Code, Callable[[Zeros, Op], Known]] = {
    Code.MUL: Zeros._product,
    Code.ADD: Zeros._sum,
    Code.SUB: Zeros._sum,
    Code.DIV: Zeros._same,
    Code.NEG: Zeros._same,
    Code.CAST: Zeros._same,
    Code.FULL: Zeros._same,
    Code.BROADCAST: Zeros._same,
    Code.SELECT: Zeros._select,
    Code.LOAD: Zeros._load,
    Code.EXPAND: Zeros._expand,
    Code.TRANS: Zeros._trans,
    Code.SUM: Zeros._reduced,
    Code.DOT: Zeros._dot,
}
