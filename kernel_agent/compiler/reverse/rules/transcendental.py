"""Functions of one float. Derivatives are written with the result where that is cheaper than with the argument."""

from __future__ import annotations

import math

from kernel_agent.compiler.reverse.elements import widened
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@rule(Code.EXP)
def _exp(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    return (b.mul(g, primal(op.result)),)


@rule(Code.EXP2)
def _exp2(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    return (b.mul(b.mul(g, primal(op.result)), b.number(math.log(2.0), g)),)


@rule(Code.LOG)
def _log(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    return (b.div(g, primal(op.operands[0])),)


@rule(Code.LOG2)
def _log2(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    return (b.div(b.mul(g, b.number(1.0 / math.log(2.0), g)), primal(op.operands[0])),)


@rule(Code.SQRT)
def _sqrt(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    return (b.div(b.mul(g, b.number(0.5, g)), primal(op.result)),)


@rule(Code.RSQRT)
def _rsqrt(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    root = widened(b, primal(op.result))
    return (b.mul(b.mul(g, b.number(-0.5, g)), b.mul(b.mul(root, root), root)),)


@rule(Code.SIN)
def _sin(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    return (b.mul(g, b.unary(Code.COS, widened(b, primal(op.operands[0])))),)


@rule(Code.COS)
def _cos(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    return (b.neg(b.mul(g, b.unary(Code.SIN, widened(b, primal(op.operands[0]))))),)


@rule(Code.TANH)
def _tanh(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    y = widened(b, primal(op.result))
    return (b.mul(g, b.sub(b.number(1.0, g), b.mul(y, y))),)


@rule(Code.SIGMOID)
def _sigmoid(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    y = widened(b, primal(op.result))
    return (b.mul(g, b.mul(y, b.sub(b.number(1.0, g), y))),)


@rule(Code.ERF)
def _erf(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    x = widened(b, primal(op.operands[0]))
    bell = b.unary(Code.EXP, b.neg(b.mul(x, x)))
    return (b.mul(b.mul(g, b.number(2.0 / math.sqrt(math.pi), g)), bell),)
