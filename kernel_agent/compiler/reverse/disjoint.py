"""Whether accesses can meet: proofs by linear forms of their offsets."""

from __future__ import annotations

import math

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Op, Value, constant, walk

Monomial = tuple[Value, ...]
"""Values that are multiplied, by age; empty for the number one."""
Form = dict[Monomial, int]
"""A sum of products: coefficient by monomial."""

_KEPT = frozenset((Code.CAST, Code.EXPAND, Code.BROADCAST, Code.FULL))


def depends_on(value: Value, block: Block) -> bool:
    """Whether a value is made from something that a block defines."""
    own = set(block.arguments)
    for op in walk(block):
        own.update(op.results)
        for inner in op.blocks:
            own.update(inner.arguments)
    return value in own


def form(value: Value) -> Form:
    """An integer as a sum of products of what cannot be taken apart."""
    number, op = constant(value), value.producer
    if isinstance(number, int):
        return {(): int(number)} if number else {}
    if op is not None and op.code in _KEPT and not op.operands[0].is_float:
        return form(op.operands[0])
    if op is not None and op.code is Code.ADD:
        return _sum(form(op.operands[0]), form(op.operands[1]), 1)
    if op is not None and op.code is Code.SUB:
        return _sum(form(op.operands[0]), form(op.operands[1]), -1)
    if op is not None and op.code is Code.MUL:
        left, right = form(op.operands[0]), form(op.operands[1])
        product: Form = {}
        for mine, count in left.items():
            for other, times in right.items():
                product = _sum(product, {_product(mine, other): count * times}, 1)
        return product
    return {(value,): 1}


def _product(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted((*a, *b), key=lambda value: value.id))


def _sum(a: Form, b: Form, sign: int) -> Form:
    result = dict(a)
    for key, count in b.items():
        result[key] = result.get(key, 0) + sign * count
    return {key: count for key, count in result.items() if count}


def disjoint(one: Op, other: Op) -> bool:
    """Whether two accesses of one program cannot meet: their offsets differ by a number that no lanes make up for.

    Proved for distances that no multiple of the strides is, and for runs of lanes that are no longer than the distance.
    """
    mine = form(one.offset)
    distance = _sum(form(other.offset), mine, -1)
    if set(distance) == {()}:
        strides = [count for key, count in mine.items() if key]
        if strides and distance[()] % math.gcd(*strides) != 0:
            return True
    return len(distance) == 1 and _side_by_side(one, other, *distance.popitem())


def _side_by_side(one: Op, other: Op, key: Monomial, count: int) -> bool:
    """Whether both run over the same lanes, at most `key` x `count` many, from places that far apart.

    Nothing else in the offsets may change within a program: else the second place may be the first one of later.
    """
    lanes = _ranges(one.offset)
    if len(lanes) != 1 or _ranges(other.offset) != lanes:
        return False
    (lane,) = lanes
    mine = form(one.offset)
    if mine.get((lane,)) != 1 or any(
        value.depth > 0 or (value is lane and len(term) > 1) for term in (*mine, key) for value in term
    ):
        return False
    if lane in key or lane.producer is None:
        return False
    if not key:
        attributes = lane.producer.attributes
        return bool(attributes["end"] - attributes["start"] <= abs(count))
    return abs(count) == 1 and all(_below(access.mask, lane, key) for access in (one, other))


def _ranges(value: Value) -> set[Value]:
    """The aranges that a value is made from."""
    op = value.producer
    if op is None:
        return set()
    if op.code is Code.ARANGE:
        return {value}
    return {lane for operand in op.operands for lane in _ranges(operand)}


def _below(mask: Value | None, lane: Value, bound: Monomial) -> bool:
    """Whether a mask says that a lane, which is not negative, is less than the bound."""
    op = None if mask is None else mask.producer
    if op is None:
        return False
    if op.code is Code.AND:
        return any(_below(operand, lane, bound) for operand in op.operands)
    if op.code in _KEPT:
        return _below(op.operands[0], lane, bound)
    if op.code is not Code.CMP or op.attributes["predicate"] != "lt":
        return False
    return form(op.operands[0]) == {(lane,): 1} and form(op.operands[1]) == {bound: 1}
