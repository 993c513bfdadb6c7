"""Sums, products, quotients and extremes of two."""

from __future__ import annotations

from kernel_agent.compiler.reverse.elements import widened
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@rule(Code.ADD)
def _add(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    return g, g


@rule(Code.SUB)
def _sub(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    return g, b.neg(g)


@rule(Code.NEG)
def _neg(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    return (b.neg(g),)


@rule(Code.MUL)
def _mul(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    x, y = op.operands
    if x is y:  # one product instead of two and a sum
        return b.mul(g, b.mul(widened(b, primal(x)), b.number(2.0, g))), None
    return b.mul(g, primal(y)), b.mul(g, primal(x))


@rule(Code.FMA)
def _fma(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    x, y, _ = op.operands
    return b.mul(g, primal(y)), b.mul(g, primal(x)), g


@rule(Code.DIV)
def _div(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    dx = b.div(g, primal(op.operands[1]))
    return dx, b.neg(b.mul(dx, primal(op.result)))


@rule(Code.REM)
def _rem(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    """x - n y, with the n that x / y was cut to: a neighbour of it where the quotient was rounded."""
    x, y = (widened(b, primal(operand)) for operand in op.operands)
    turns = b.div(b.sub(x, widened(b, primal(op.result))), y)
    whole = b.unary(Code.FLOOR, b.add(turns, b.number(0.5, g)))
    return g, b.neg(b.mul(g, whole))


@rule(Code.MAX, Code.MIN)
def _extreme(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    """To the one that was chosen; equal ones share evenly, as in `torch.maximum`.

    With `first` it goes to the first of equal ones: a clamped value keeps it on the bounds, as in `torch.clamp`.
    """
    x, y = (primal(operand) for operand in op.operands)
    if op.attributes.get("first"):
        kept = b.compare("ge" if op.code is Code.MAX else "le", x, y)
        return b.select(kept, g, b.zero(g)), b.select(kept, b.zero(g), g)
    half = b.mul(g, b.number(0.5, g))
    tie = b.compare("eq", x, y)
    first = b.compare("gt" if op.code is Code.MAX else "lt", x, y)
    zero = b.zero(g)
    return b.select(tie, half, b.select(first, g, zero)), b.select(tie, half, b.select(first, zero, g))


@rule(Code.ABS)
def _abs(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    """Times the sign, which is zero at zero."""
    x = primal(op.operands[0])
    zero = b.zero(x)
    below = b.select(b.compare("lt", x, zero), b.neg(g), b.zero(g))
    return (b.select(b.compare("gt", x, zero), g, below),)
