"""Matrix products."""

from __future__ import annotations

from kernel_agent.compiler.reverse.lanes import Atom
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@rule(Code.DOT, mixes=True)
def _dot(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    """da = g b', db = a' g, in the precision of the forward; the cotangent takes the element of what it meets, and
    both that of bf16 where this is of 8 bits: those hold no cotangent, and ask for longer sums than the forward's.

    A row of g that is off must not meet an infinite row of a, nor a column one of b: their products are summed.
    """
    x, y = op.operands
    rank = len(x.shape)
    order = (*range(rank - 2), rank - 1, rank - 2)
    whole = b.whole(g, op.result.shape)
    precision = op.attributes["precision"]
    off = primal.lanes.support(g)
    rows = [atom for atom in off if not atom[0].shape or atom[0].shape[-1] == 1]
    columns = [atom for atom in off if not atom[0].shape or atom[0].shape[-2] == 1]
    left = _restricted(primal, b.whole(primal(x), x.shape), rows)
    right = _restricted(primal, b.whole(primal(y), y.shape), columns)
    left, right = (b.cast(value, _meeting(value.element)) for value in (left, right))
    dx = b.dot(b.cast(whole, right.element), b.trans(right, order), precision, g.element)
    dy = b.dot(b.trans(left, order), b.cast(whole, left.element), precision, g.element)
    return dx, dy


def _meeting(element: str) -> str:
    return "bf16" if element.startswith("f8") else element


def _restricted(primal: Primal, value: Value, off: list[Atom]) -> Value:
    return value if not off or primal.lanes.finite(value) else primal.lanes.restricted(value, off)
