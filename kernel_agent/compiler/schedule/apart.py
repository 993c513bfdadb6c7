"""Sums over a row that wait for another sum over it, as sums that wait for nothing.

sum(a - b * s) = sum(a) - s * sum(b), where s comes out of the first sum. All sums of a row are then computed in one go,
and what they are made of need not be held from the first sum to the second: for a row that fills the registers that is
what spills. Shorter rows are as fast with the sum that waits, or faster: it is one sum less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import ELEMENTWISE, REDUCTIONS, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Op, Value

MOST = 3
"""Sums that one may become: each has the warps wait for each other."""


@dataclass(frozen=True)
class Term:
    """One of the terms that a tile is the sum of."""

    tile: Value
    """Waits for no sum."""
    times: tuple[Value, ...] = ()
    """Factors that do, the same along the summed axis."""
    over: tuple[Value, ...] = ()
    """Divisors, likewise."""
    negative: bool = False

    @property
    def waits(self) -> bool:
        """Whether it has a factor that waits for a sum."""
        return bool(self.times or self.over)


def waiting_sums(block: Block) -> dict[Op, list[Term]]:
    """Sums of a block without loops that wait for others of it without need, and their terms."""
    late: set[Value] = set()
    found = {}
    for op in block.ops:
        if op.code is Code.SUM and op.operands[0] in late:
            terms = _terms(op.operands[0], op.attributes["axis"], late)
            count = sum(term.waits for term in terms) + any(not term.waits for term in terms)
            if terms and count <= MOST:
                found[op] = terms
        if op.code in REDUCTIONS or late & set(op.operands):
            late.update(op.results)
    return found


def _terms(value: Value, axis: int, late: Collection[Value]) -> list[Term]:
    """What a tile is the sum of; none where it is not linear in what waits for a sum."""
    if value not in late:
        return [Term(value)]
    op = value.producer
    assert op is not None
    if op.code is Code.NEG:
        return _negated(_terms(op.operands[0], axis, late))
    if op.code in (Code.ADD, Code.SUB):
        if any(not _is_along(operand, axis, value.shape) for operand in op.operands):
            return []
        left, right = (_terms(operand, axis, late) for operand in op.operands)
        right = _negated(right) if op.code is Code.SUB else right
        return left + right if left and right else []
    if op.code is Code.MUL:
        for factor, rest in (op.operands, reversed(op.operands)):
            if _is_one(factor, axis) and _is_along(rest, axis, value.shape):
                return [replace(term, times=(*term.times, factor)) for term in _terms(rest, axis, late)]
    if op.code is Code.DIV and _is_one(op.operands[1], axis) and _is_along(op.operands[0], axis, value.shape):
        return [replace(term, over=(*term.over, op.operands[1])) for term in _terms(op.operands[0], axis, late)]
    return []


def _negated(terms: Sequence[Term]) -> list[Term]:
    return [replace(term, negative=not term.negative) for term in terms]


def _is_along(value: Value, axis: int, shape: tuple[int, ...]) -> bool:
    """Whether a value has all elements along the axis of a tile."""
    return len(value.shape) == len(shape) and value.shape[axis] == shape[axis]


def _is_one(value: Value, axis: int) -> bool:
    """Whether a value is the same along an axis, in a form that says so."""
    op = value.producer
    if value.shape == () or (op is not None and op.code is Code.EXPAND and op.attributes["axis"] == axis):
        return True
    return op is not None and op.code in ELEMENTWISE and all(_is_one(operand, axis) for operand in op.operands)


def sum_of(copier: Copier, op: Op, terms: Sequence[Term]) -> Value:
    """The copy of a sum, term by term."""
    b, axis, shape = copier.b, op.attributes["axis"], op.operands[0].shape
    if sum(not term.waits for term in terms) == 1:
        terms = [term if term.waits else _bare(term, axis) for term in terms]
    together: Value | None = None
    for term in terms:
        if not term.waits:
            together = _added(b, together, copier[term.tile], term.negative)
    total = None if together is None else b.sum(b.whole(together, shape), axis)
    for term in terms:
        if term.waits:
            part = b.sum(b.whole(copier[term.tile], shape), axis)
            for factor in term.times:
                part = b.mul(part, _flat(copier, factor, axis))
            for divisor in term.over:
                part = b.div(part, _flat(copier, divisor, axis))
            total = _added(b, total, part, term.negative)
    assert total is not None
    return total


def _bare(term: Term, axis: int) -> Term:
    """The term with factors of its tile that are the same along the axis beside it: the tile without them is mostly
    there already, and one more would fill registers."""
    op = term.tile.producer
    if op is not None and op.code is Code.MUL:
        for factor, rest in (op.operands, reversed(op.operands)):
            if _is_one(factor, axis) and _is_along(rest, axis, term.tile.shape):
                return _bare(replace(term, tile=rest, times=(*term.times, factor)), axis)
    return term


def _added(b: Builder, total: Value | None, part: Value, negative: bool) -> Value:
    if total is None:
        return b.neg(part) if negative else part
    return b.sub(total, part) if negative else b.add(total, part)


def _flat(copier: Copier, value: Value, axis: int) -> Value:
    """What `_is_one`, without the axis."""
    op = value.producer
    if value.shape == ():
        return copier[value]
    assert op is not None
    if op.code is Code.EXPAND and op.attributes["axis"] == axis:
        return copier[op.operands[0]]
    flat = copier.b.again(op, [_flat(copier, operand, axis) for operand in op.operands])
    assert isinstance(flat, Value)
    return flat
