"""`is_positive`: whether a value is a sum of exponentials, weighed perhaps by what is not negative."""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value, bare, constant

_ALL = frozenset((Code.ADD, Code.MUL, Code.DIV, Code.FMA, Code.MIN))
_SAME = frozenset((Code.SUM, Code.CUMSUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.CAST, Code.TRANS, Code.RESHAPE))
_NEVER_NEGATIVE = frozenset((Code.EXP, Code.EXP2, Code.SIGMOID, Code.ABS, Code.SQRT, Code.RSQRT))


def is_positive(value: Value, known: frozenset[Value] = frozenset()) -> bool:
    """Whether a float is never negative, as its operations show. `known`: carries of loops that are taken to be so."""
    value = bare(value)
    number = constant(value)
    if value in known or number is not None:
        return number is None or number >= 0
    op = value.producer
    if op is None:
        return False
    if op.code in _NEVER_NEGATIVE:
        return True
    if op.code is Code.MAX:
        return any(is_positive(one, known) for one in op.operands)
    if op.code is Code.SELECT:
        return all(is_positive(one, known) for one in op.operands[1:])
    if op.code is Code.MUL and bare(op.operands[0]) is bare(op.operands[1]):
        return True
    if op.code in _ALL | _SAME:
        return all(is_positive(one, known) for one in op.operands)
    if op.code is Code.FOR:
        place = op.results.index(value)
        carry, last = op.blocks[0].arguments[place + 1], op.blocks[0].yields[place]
        return is_positive(op.operands[place + 3], known) and is_positive(last, known | {carry})
    return False
