"""Signs of floats that can be told from how they are made; scalars that are divided by are taken to be positive."""

from __future__ import annotations

from collections.abc import Callable

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, beneath, constant

DEEP = 100
"""Operations in a row after which nobody looks further."""

_KEPT = frozenset((Code.CAST, Code.FULL, Code.EXPAND, Code.BROADCAST, Code.TRANS, Code.RESHAPE, Code.FLIP))


def source(value: Value) -> Value:
    """What a value is a conversion or another shape of."""
    return beneath(value, _KEPT)


class Signs:
    """Remembers what was found out about values."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Value], bool] = {}
        self._depth = 0

    def positive(self, value: Value) -> bool:
        """Larger than zero, or a scalar: one program divides all its lanes by it."""
        return self._asked("positive", value, self._positive)

    def not_negative(self, value: Value) -> bool:
        """At least zero, if it is a number."""
        return self._asked("not negative", value, self._not_negative)

    def at_most_zero(self, value: Value) -> bool:
        """Zero or less, if it is a number: such as x - max(x)."""
        return self._asked("at most zero", value, self._at_most_zero)

    def _asked(self, question: str, value: Value, answer: Callable[[Op], bool]) -> bool:
        number = constant(value)
        if number is not None:
            return number > 0 if question == "positive" else number >= 0 if question == "not negative" else number <= 0
        if question == "positive" and not value.shape:
            return True
        if value.producer is None or self._depth > DEEP:
            return False
        if (question, value) not in self._known:
            self._depth += 1
            self._known[question, value] = answer(value.producer)
            self._depth -= 1
        return self._known[question, value]

    def _positive(self, op: Op) -> bool:
        x, is_positive, is_natural = op.operands, self.positive, self.not_negative
        if op.code is Code.ADD:
            return (is_positive(x[0]) and is_natural(x[1])) or (is_natural(x[0]) and is_positive(x[1]))
        if op.code in (Code.MUL, Code.DIV):
            return is_positive(x[0]) and is_positive(x[1])
        if op.code is Code.MAX:
            return is_positive(x[0]) or is_positive(x[1])
        return op.code in _KEPT | {Code.SQRT} and is_positive(x[0])

    def _not_negative(self, op: Op) -> bool:
        x, is_natural = op.operands, self.not_negative
        if op.code in (Code.EXP, Code.EXP2, Code.SIGMOID, Code.SQRT, Code.ABS):
            return True
        if op.code is Code.MUL and x[0] is x[1]:
            return True
        if op.code is Code.DIV:
            return is_natural(x[0]) and (is_natural(x[1]) or (not x[1].shape and not x[1].is_float))
        if op.code in (Code.ADD, Code.MUL):
            return is_natural(x[0]) and is_natural(x[1])
        if op.code is Code.MAX:
            return is_natural(x[0]) or is_natural(x[1])
        if op.code is Code.SELECT:
            return is_natural(x[1]) and is_natural(x[2])
        return op.code in _KEPT | {Code.SUM, Code.CUMSUM} and is_natural(x[0])

    def _at_most_zero(self, op: Op) -> bool:
        x = op.operands
        if op.code is Code.NEG:
            return self.not_negative(x[0])
        if op.code is Code.SUB:
            return _bounds(x[1], x[0])
        if op.code is Code.MUL:
            below, above = self.at_most_zero, self.not_negative
            return (below(x[0]) and above(x[1])) or (above(x[0]) and below(x[1]))
        if op.code is Code.MIN:
            return any(self.at_most_zero(operand) for operand in x)
        return op.code in _KEPT and self.at_most_zero(x[0])


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
