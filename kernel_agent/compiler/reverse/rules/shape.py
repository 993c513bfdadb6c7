"""What only moves elements. Cotangents that are smaller than a result broadcast, which moving keeps where it can."""

from __future__ import annotations

from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule, rule_of_many
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@rule(Code.EXPAND)
def _expand(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    """The cotangent has the extent 1 there, which goes."""
    return (b.sum(g, op.attributes["axis"]) if g.shape else g,)


@rule(Code.FULL, Code.BROADCAST)
def _broadcast(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    """Of the result's extents: whoever takes it sums it to the operand's."""
    return (g,)


@rule(Code.TRANS)
def _trans(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    order = op.attributes["order"]
    return (b.trans(g, [order.index(axis) for axis in range(len(order))]) if g.shape else g,)


@rule(Code.RESHAPE, mixes=True)
def _reshape(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    if not g.shape:
        return (g,)
    return (b.reshape(b.whole(g, op.result.shape), op.operands[0].shape),)


@rule(Code.JOIN, mixes=True)
def _join(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    whole = b.whole(g, op.result.shape)
    halves = [Value(g.element, op.result.shape[:-1]) for _ in range(2)]
    return b.add_op(Op(Code.SPLIT, (whole,), halves)).results


@rule_of_many(Code.SPLIT, mixes=True)
def _split(b: Builder, op: Op, primal: Primal, cotangents: tuple[Value | None, ...]) -> Found:  # noqa: ARG001
    shape = op.operands[0].shape
    given = next(g for g in cotangents if g is not None)
    halves = [b.whole(b.zero(given) if g is None else g, shape[:-1]) for g in cotangents]
    return (b.pure(Code.JOIN, halves, given.element, shape),)


@rule(Code.FLIP, mixes=True)
def _flip(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    if not g.shape or g.shape[op.attributes["axis"]] == 1:
        return (g,)
    return (b.pure(Code.FLIP, (g,), g.element, g.shape, {"axis": op.attributes["axis"]}),)
