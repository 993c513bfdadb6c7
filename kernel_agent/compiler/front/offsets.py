"""Arithmetic on offsets: 32 bits where the kernel computes so, 64 where one part has them."""

from __future__ import annotations

from collections.abc import Collection

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value, constant


def _together(builder: Builder, a: Value, b: Value) -> tuple[Value, Value]:
    """Both with the wider of their elements."""
    if a.element == b.element:
        return a, b
    element = max(a.element, b.element, "i32", key=lambda name: int(name[1:]))
    return builder.cast(a, element), builder.cast(b, element)


def plus(builder: Builder, a: Value, b: Value) -> Value:
    """a + b."""
    for zero, other in ((a, b), (b, a)):
        if constant(zero) == 0 and int(other.element[1:]) >= 32:
            return other
    return builder.add(*_together(builder, a, b))


def product(builder: Builder, a: Value, b: Value) -> Value:
    """a * b; by the constant one nothing becomes wider."""
    for one, other in ((a, b), (b, a)):
        if constant(one) == 1:
            return other
    return builder.mul(*_together(builder, a, b))


def narrowed(builder: Builder, value: Value) -> Value:
    """The i32 that an i64 is."""
    op = value.producer
    if op is not None and op.code is Code.CAST and op.operands[0].element == "i32":
        return op.operands[0]
    known = constant(value)
    if known is not None and op is not None and abs(known) < 2**31:
        return builder.const(int(known), "i32", op.attributes["symbol"])
    return value


_KEEP_SIGN = frozenset((Code.ADD, Code.MUL, Code.EXPAND, Code.CAST, Code.BROADCAST, Code.FULL, Code.MAX, Code.FLOORDIV))


def at_least_zero(value: Value, known: Collection[Value]) -> bool:
    """Whether an integer is made of nothing that is negative; `known`: what else is not."""
    found = constant(value)
    if found is not None:
        return found >= 0
    op = value.producer
    if op is None:
        return value in known
    if op.code in (Code.PROGRAM_ID, Code.NUM_PROGRAMS):
        return True
    if op.code is Code.ARANGE:
        return bool(op.attributes["start"] >= 0)
    return (
        op.code in _KEEP_SIGN
        and all(not operand.is_float for operand in op.operands)
        and all(at_least_zero(operand, known) for operand in op.operands)
    )
