"""Which lanes of a cotangent are zero by their meaning, and whether they are when computed.

A lane that a mask or a `where` switches off has the cotangent zero, but what it is multiplied with there may be
infinite or NaN (`1 / x` of a padded zero, `exp` of what overflows), and 0 * inf is NaN. That does no harm as long as
the lane stays off, and all of it once it is summed with others. So before lanes meet, `settled` puts a `where` around
a value that is not known to be finite in the lanes that are off.

What lanes that are on hold is taken to be finite: where it is not, the exact gradient is not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kernel_agent.compiler.reverse.signs import DEEP, Signs, source
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, constant, is_constant

Atom = tuple[Value, bool]
"""A mask that broadcasts to the value, and what it is where the value may differ from zero."""
Support = frozenset[Atom]
"""A value is zero where one of these does not hold."""

NOWHERE: Support = frozenset()
"""Of a value that may differ from zero in all lanes."""

_CLOSED = frozenset(
    (Code.ADD, Code.SUB, Code.MUL, Code.NEG, Code.FMA, Code.ABS, Code.MAX, Code.MIN, Code.SIN, Code.COS, Code.TANH,
     Code.ERF, Code.SIGMOID, Code.FLOOR, Code.CEIL, Code.CAST, Code.FULL, Code.EXPAND, Code.BROADCAST, Code.TRANS,
     Code.RESHAPE, Code.JOIN, Code.SPLIT, Code.FLIP, Code.GATHER, Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN,
     Code.CUMSUM, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE, Code.DOT, Code.KNOWN)
)  # fmt: skip
"""Finite for finite operands; that a sum or product could overflow is left out of account."""


def in_order(support: Iterable[Atom]) -> list[Atom]:
    """As the masks were made: what is made of them is made in one order then, and texts are the same each time."""
    return sorted(support, key=lambda atom: (atom[0].id, atom[1]))


class Lanes:
    """Knows the values of a kernel under construction."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self.trusted: set[Value] = set()
        """Carries and results of loops whose values were settled before they were yielded."""
        self._finite: dict[Value, bool] = {}
        self._infinite: dict[Value, Support] = {}
        self._signs = Signs()
        self._depth = 0

    # --- what is made

    def settled(self, value: Value) -> Value:
        """The value, zero in the lanes that are off."""
        off = self.support(value)
        if not off or self.finite(value):
            return value
        return self.restricted(value, off)

    def restricted(self, value: Value, support: Iterable[Atom]) -> Value:
        """The value where the masks hold, zero elsewhere."""
        b, zero = self.b, self.b.zero(value)
        positive: Value | None = None
        for mask, wanted in in_order(support):
            if not wanted:
                value = b.select(mask, zero, value)
            elif positive is None:
                positive = mask
            else:
                positive = b.logical_and(positive, mask)
        return value if positive is None else b.select(positive, value, zero)

    def sum(self, x: Value, y: Value) -> Value:
        """x + y, after lanes were settled that are off in one of the two only."""
        mine, others = self.support(x), self.support(y)
        if mine - others and not self.finite(x):
            x = self.restricted(x, mine - others)
        if others - mine and not self.finite(y):
            y = self.restricted(y, others - mine)
        return self.b.add(x, y)

    # --- where a value is zero

    def conditions(self, mask: Value) -> Support:
        """The masks that all hold where this one does."""
        op = mask.producer
        if constant(mask) is True:
            return NOWHERE
        if op is not None and op.code is Code.AND:
            return self.conditions(op.operands[0]) | self.conditions(op.operands[1])
        if op is not None and op.code is Code.EXPAND:
            axis = op.attributes["axis"]
            return frozenset(
                (self.b.expand(inner, axis), wanted) for inner, wanted in in_order(self.conditions(op.operands[0]))
            )
        if op is not None and op.code in (Code.FULL, Code.BROADCAST):
            return self.conditions(op.operands[0])
        return frozenset(((mask, True),))

    def support(self, value: Value) -> Support:
        """Masks outside of which a value is zero by its meaning."""
        return self._support(value, {})

    def _support(self, value: Value, seen: dict[Value, Support]) -> Support:
        if value not in seen:
            op = value.producer
            self._depth += 1
            seen[value] = NOWHERE if op is None or self._depth > DEEP else self._of(op, value, seen)
            self._depth -= 1
        return seen[value]

    def _of(self, op: Op, value: Value, seen: dict[Value, Support]) -> Support:
        def of(operand: Value) -> Support:
            return self._support(operand, seen)

        code, operands = op.code, op.operands
        if code is Code.LOAD:
            padded = op.other is not None and is_constant(op.other, 0)
            return self.conditions(op.mask) if padded and op.mask is not None else NOWHERE
        if code is Code.SELECT:
            return self._of_select(op, of(operands[1]), of(operands[2]))
        if code is Code.MUL:
            off = of(operands[0]) | of(operands[1])
            return off | self._unbounded(operands[0]) | self._unbounded(operands[1])
        if code in (Code.NEG, Code.CAST, Code.DIV, Code.FULL, Code.BROADCAST):
            return of(operands[0])
        if code in (Code.ADD, Code.SUB):
            return of(operands[0]) & of(operands[1])
        if code is Code.FMA:
            return (of(operands[0]) | of(operands[1])) & of(operands[2])
        if code is Code.EXPAND:
            axis = op.attributes["axis"]
            return frozenset((self.b.expand(mask, axis), wanted) for mask, wanted in in_order(of(operands[0])))
        if code is Code.TRANS:
            order = op.attributes["order"]
            return frozenset(
                (self.b.trans(mask, order) if mask.shape else mask, wanted)
                for mask, wanted in in_order(of(operands[0]))
            )
        if code is Code.SUM:
            return self._without(op.attributes["axis"], of(operands[0]))
        if code is Code.RESHAPE and (axis := _squeezed(operands[0].shape, value.shape)) is not None:
            return self._without(axis, of(operands[0]))
        if code is Code.DOT:
            rows = (atom for atom in of(operands[0]) if not atom[0].shape or atom[0].shape[-1] == 1)
            columns = (atom for atom in of(operands[1]) if not atom[0].shape or atom[0].shape[-2] == 1)
            return frozenset((*rows, *columns))
        return NOWHERE

    def _unbounded(self, value: Value) -> Support:
        """Masks outside of which a value was made infinite: no multiple of it counts there, however small."""
        if value not in self._infinite:
            self._infinite[value] = NOWHERE  # for what depends on itself
            op = value.producer
            self._depth += 1
            if op is not None and value.shape and self._depth <= DEEP and not self.finite(value):
                self._infinite[value] = self._made_infinite(op)
            self._depth -= 1
        return self._infinite[value]

    def _made_infinite(self, op: Op) -> Support:
        code, operands = op.code, op.operands
        if code is Code.LOAD:
            infinite = op.other is not None and _is_infinite(op.other)
            return self.conditions(op.mask) if infinite and op.mask is not None else NOWHERE
        if code is Code.SELECT:
            own = self.conditions(operands[0]) if _is_infinite(operands[2]) else NOWHERE
            return own | self._unbounded(operands[1])
        if code in (Code.NEG, Code.CAST, Code.DIV, Code.FULL, Code.BROADCAST):
            return self._unbounded(operands[0])
        if code in (Code.ADD, Code.SUB, Code.MUL):
            return self._unbounded(operands[0]) | self._unbounded(operands[1])
        if code is Code.EXPAND:
            axis = op.attributes["axis"]
            return frozenset(
                (self.b.expand(mask, axis), wanted) for mask, wanted in in_order(self._unbounded(operands[0]))
            )
        return NOWHERE

    def _of_select(self, op: Op, first: Support, second: Support) -> Support:
        condition, x, y = op.operands
        if is_constant(y, 0):
            return first | self.conditions(condition)
        if is_constant(x, 0):
            unmet = self.conditions(condition)
            return second | (frozenset((mask, not wanted) for mask, wanted in unmet) if len(unmet) == 1 else NOWHERE)
        return first & second

    def _without(self, axis: int, support: Support) -> Support:
        """Masks that are the same all along an axis, without it."""
        found = []
        for mask, wanted in in_order(support):
            if not mask.shape:
                found.append((mask, wanted))
            elif mask.shape[axis] == 1:
                op = mask.producer
                inner = op is not None and op.code is Code.EXPAND and op.attributes["axis"] == axis
                shape = (*mask.shape[:axis], *mask.shape[axis + 1 :])
                found.append((op.operands[0] if op is not None and inner else self.b.reshape(mask, shape), wanted))
        return frozenset(found)

    # --- where a value is finite

    def finite(self, value: Value) -> bool:
        """Whether lanes that are off are known to hold finite numbers too. A scalar has no lanes."""
        if not value.shape or not value.is_float or value in self.trusted:
            return True
        if value not in self._finite:
            self._finite[value] = False  # for what depends on itself
            op = value.producer
            self._depth += 1
            self._finite[value] = op is not None and self._depth <= DEEP and self._is_finite(op)
            self._depth -= 1
        return self._finite[value]

    def _is_finite(self, op: Op) -> bool:
        code, operands = op.code, op.operands
        if code is Code.LOAD:
            return op.mask is None or (op.other is not None and _is_number(op.other))
        if code in _CLOSED:
            return all(self._number(operand) for operand in operands)
        if code is Code.SELECT:
            return self._selected(op)
        if code in (Code.EXP, Code.EXP2):
            return self._signs.at_most_zero(operands[0]) and (self._number(operands[0]) or self._shifted(operands[0]))
        if code is Code.DIV:
            return self._number(operands[0]) and self._number(operands[1]) and self._signs.positive(operands[1])
        if code is Code.SQRT:
            return self._number(operands[0]) and self._signs.not_negative(operands[0])
        if code in (Code.LOG, Code.LOG2, Code.RSQRT):
            return self._number(operands[0]) and self._signs.positive(operands[0])
        return False

    def _number(self, value: Value) -> bool:
        return _is_number(value) if constant(value) is not None else self.finite(value)

    def _shifted(self, exponent: Value) -> bool:
        """x - m for the maximum m of x, where padding of x may be -inf but m is finite."""
        op = exponent.producer
        if op is None or op.code is not Code.SUB:
            return False
        x, upper = op.operands
        return self._below_infinity(x) and (not source(upper).shape or self.finite(upper))

    def _below_infinity(self, value: Value) -> bool:
        """Whether lanes that are off hold a number or -inf."""
        op, number = value.producer, constant(value)
        if number is not None:
            return number < math.inf
        if op is None or self.finite(value):
            return self.finite(value)
        x = op.operands
        if op.code is Code.LOAD:
            return op.other is not None and self._below_infinity(op.other)
        if op.code is Code.SELECT:
            return self._below_infinity(x[1]) and self._below_infinity(x[2])
        if op.code is Code.ADD:
            return all(self._below_infinity(operand) for operand in x)
        if op.code is Code.MUL:
            return any(
                self._signs.positive(x[k]) and constant(x[k]) is not None and self._below_infinity(x[1 - k])
                for k in (0, 1)
            )
        return source(value) is not value and self._below_infinity(source(value))

    def _selected(self, op: Op) -> bool:
        """A finite number where the condition fails; where it holds, all lanes are on, or hold finite numbers."""
        condition, x, y = op.operands
        if not self._number(y):
            return False
        return self._number(x) or self.support(x) <= self.conditions(condition)


def _is_number(value: Value) -> bool:
    found = constant(value)
    return found is not None and math.isfinite(found)


def _is_infinite(value: Value) -> bool:
    found = constant(value)
    return found is not None and math.isinf(found)


def _squeezed(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """The axis of extent 1 that a reshape takes away, if that is all it does."""
    for axis, extent in enumerate(before):
        if extent == 1 and (*before[:axis], *before[axis + 1 :]) == after:
            return axis
    return None
