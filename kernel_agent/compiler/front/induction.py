"""Closed forms: what a loop only adds an invariant to is start + trip * step, so that no trip waits for another."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.front.offsets import plus, product
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value, constant, is_constant


@dataclass(frozen=True)
class Advance:
    """What every trip adds to a value that a loop carries: known before the loop. None: nothing."""

    step: Value | None


@dataclass(frozen=True)
class Range:
    """Bounds of a loop."""

    start: Value
    stop: Value
    step: Value

    def passed(self, builder: Builder, index: Value) -> Value:
        """How far the index has come."""
        return builder.sub(index, self.start)

    def trips(self, builder: Builder) -> Value:
        """How often the loop runs."""
        length = builder.sub(self.stop, self.start)
        if not is_constant(self.step, 1):
            length = builder.add(length, builder.sub(self.step, builder.number(1, self.step)))
            length = builder.elementwise(Code.FLOORDIV, (length, self.step))
        return builder.elementwise(Code.MAX, (length, builder.zero(length)))


def advance(builder: Builder, carried: Value, passed_on: Value, depth: int) -> Advance | None:
    """How a carried integer changes; None where that is not by something known outside of the loop at `depth`."""
    if passed_on is carried:
        return Advance(None)
    op = passed_on.producer
    if op is None or passed_on.depth < depth:
        return None
    if op.code in (Code.ADD, Code.SUB):
        first, second = op.operands
        sides = [(first, second)] if op.code is Code.SUB else [(first, second), (second, first)]
        for inner, term in sides:
            if term.depth >= depth:
                continue
            found = advance(builder, carried, inner, depth)
            if found is not None:
                term = builder.neg(term) if op.code is Code.SUB else term
                return Advance(term if found.step is None else plus(builder, found.step, term))
    if op.code in (Code.FULL, Code.BROADCAST):
        return advance(builder, carried, op.operands[0], depth)
    return None


def quotient(builder: Builder, value: Value, divisor: Value) -> Value | None:
    """q with value = q * divisor at every size of the tiles, where that shows."""
    if value is divisor:
        return builder.number(1, value)
    op = value.producer
    if op is None:
        return None
    number, by = constant(value), constant(divisor)
    if number is not None and by is not None and divisor.producer is not None:
        symbols = op.attributes["symbol"], divisor.producer.attributes["symbol"]
        if symbols[0] == symbols[1] and symbols[0] is not None:
            return builder.number(1, value)
        divides = symbols == (None, None) and by != 0 and number % by == 0
        return builder.number(number // by, value) if divides else None
    if op.code is Code.MUL:
        for one, other in (op.operands, op.operands[::-1]):
            inner = quotient(builder, one, divisor)
            if inner is not None:
                return product(builder, inner, other)
    if op.code is Code.CAST and not op.operands[0].is_float:
        inner = quotient(builder, op.operands[0], divisor)
        return None if inner is None else builder.cast(inner, value.element)
    return None


def at(builder: Builder, start: Value, step: Value, index: Value, bounds: Range) -> Value:
    """The value in the trip of an index."""
    passed = bounds.passed(builder, index)
    share = quotient(builder, step, bounds.step)
    if share is not None:
        return plus(builder, start, product(builder, passed, share))
    if not is_constant(bounds.step, 1):
        passed = builder.elementwise(Code.FLOORDIV, (passed, bounds.step))
    return plus(builder, start, product(builder, passed, step))


def after(builder: Builder, start: Value, step: Value, bounds: Range) -> Value:
    """The value after the loop."""
    return plus(builder, start, product(builder, bounds.trips(builder), step))
