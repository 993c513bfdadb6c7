"""Reductions along an axis."""

from __future__ import annotations

from kernel_agent.compiler.reverse.elements import index_along
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@rule(Code.SUM)
def _sum(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    return (b.expand(g, op.attributes["axis"]),)


@rule(Code.REDUCE_MAX, Code.REDUCE_MIN)
def _extreme(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    """To where the extreme came from; equal ones share evenly, as in `torch.amax`.

    With `first` it goes to the first of equal ones, whose index was asked for, too.
    """
    axis = op.attributes["axis"]
    x = b.whole(primal(op.operands[0]), op.operands[0].shape)
    if op.attributes.get("first"):
        index = b.reduce(Code.ARG_MAX if op.code is Code.REDUCE_MAX else Code.ARG_MIN, x, axis, "i32")
        hit = b.compare("eq", index_along(b, x.shape, axis), b.expand(index, axis))
        return (b.select(hit, b.expand(g, axis), b.zero(g)),)
    chosen = b.compare("eq", x, b.expand(primal(op.result), axis))
    share = b.div(g, b.sum(b.cast(chosen, g.element), axis))
    return (b.select(chosen, b.expand(share, axis), b.zero(g)),)
