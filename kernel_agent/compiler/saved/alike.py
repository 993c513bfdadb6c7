"""Whether values of two loops over the same trips are the same in every trip."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.uses import tapes_of
from kernel_agent.compiler.ssa.value import Op, Value, walk


def same_trips(one: Op, other: Op) -> bool:
    """Whether two FORs have the same bounds and direction, and none remembers trips by tapes."""
    if one.operands[:3] != other.operands[:3] or one.attributes["reverse"] or other.attributes["reverse"]:
        return False
    return not any(
        next(tapes_of(loop.blocks[0], code), None) is not None
        for loop in (one, other)
        for code in (Code.TAPE_STORE, Code.TAPE_LOAD)
    )


def alike(a: Value | None, b: Value | None, stands: Mapping[Value, Value]) -> bool:
    """Whether two values are computed alike, where what is in `stands` is what it maps to."""
    if a is b:
        return True
    if a is None or b is None:
        return False
    if stands.get(a) is b:
        return True
    left, right = a.producer, b.producer
    if left is None or right is None or left.code is not right.code or left.blocks or left.code in EFFECTS:
        return False
    if left.attributes != right.attributes or a.shape != b.shape or a.element != b.element:
        return False
    if len(left.operands) != len(right.operands) or not left.operands or len(left.results) != 1:
        return False
    return all(alike(x, y, stands) for x, y in zip(left.operands, right.operands, strict=True))


def inside(loop: Op) -> set[Value]:
    """What a loop's block defines."""
    (block,) = loop.blocks
    found = set(block.arguments)
    for op in walk(block):
        found.update(op.results)
        for inner in op.blocks:
            found.update(inner.arguments)
    return found
