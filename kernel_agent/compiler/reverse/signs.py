"""Signs of floats that can be told from how they are made; scalars that are divided by are taken to be positive."""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value, constant

_KEPT = frozenset((Code.CAST, Code.FULL, Code.EXPAND, Code.BROADCAST, Code.TRANS, Code.RESHAPE, Code.FLIP))


def source(value: Value) -> Value:
    """What a value is a conversion or another shape of."""
    while value.producer is not None and value.producer.code in _KEPT:
        value = value.producer.operands[0]
    return value


def positive(value: Value) -> bool:
    """Larger than zero, or a scalar: one program divides all its lanes by it."""
    number, op = constant(value), value.producer
    if number is not None:
        return number > 0
    if not value.shape:
        return True
    if op is None:
        return False
    x = op.operands
    if op.code is Code.ADD:
        return (positive(x[0]) and not_negative(x[1])) or (not_negative(x[0]) and positive(x[1]))
    if op.code in (Code.MUL, Code.DIV):
        return positive(x[0]) and positive(x[1])
    if op.code is Code.MAX:
        return positive(x[0]) or positive(x[1])
    return op.code in _KEPT | {Code.SQRT} and positive(x[0])


def not_negative(value: Value) -> bool:
    """At least zero, if it is a number."""
    number, op = constant(value), value.producer
    if number is not None:
        return number >= 0
    if op is None:
        return False
    x = op.operands
    if op.code in (Code.EXP, Code.EXP2, Code.SIGMOID, Code.SQRT, Code.ABS):
        return True
    if op.code is Code.MUL and x[0] is x[1]:
        return True
    if op.code is Code.DIV:
        return not_negative(x[0]) and (not_negative(x[1]) or (not x[1].shape and not x[1].is_float))
    if op.code in (Code.ADD, Code.MUL):
        return not_negative(x[0]) and not_negative(x[1])
    if op.code is Code.MAX:
        return not_negative(x[0]) or not_negative(x[1])
    if op.code is Code.SELECT:
        return not_negative(x[1]) and not_negative(x[2])
    return op.code in _KEPT | {Code.SUM, Code.CUMSUM} and not_negative(x[0])


def at_most_zero(value: Value) -> bool:
    """Zero or less, if it is a number: such as x - max(x)."""
    number, op = constant(value), value.producer
    if number is not None:
        return number <= 0
    if op is None:
        return False
    if op.code is Code.NEG:
        return not_negative(op.operands[0])
    if op.code is Code.SUB:
        return _bounds(op.operands[1], op.operands[0])
    if op.code is Code.MUL:
        x, y = op.operands
        return (at_most_zero(x) and not_negative(y)) or (not_negative(x) and at_most_zero(y))
    if op.code is Code.MIN:
        return any(at_most_zero(operand) for operand in op.operands)
    return op.code in _KEPT and at_most_zero(op.operands[0])


def _bounds(upper: Value, value: Value) -> bool:
    """Whether one value is the largest element of another along an axis, or of more."""
    op = upper.producer
    if op is None:
        return False
    if op.code is Code.MAX:
        return any(operand is value or _bounds(operand, value) for operand in op.operands)
    if op.code is Code.REDUCE_MAX:
        return op.operands[0] is value
    return op.code in _KEPT and _bounds(op.operands[0], value)
