"""Running sums and linear recurrences."""

from __future__ import annotations

from kernel_agent.compiler.reverse.elements import widened
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@rule(Code.CUMSUM, mixes=True)
def _cumsum(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    whole = b.whole(g, op.result.shape)
    attributes = {"axis": op.attributes["axis"], "reverse": not op.attributes["reverse"]}
    return (b.pure(Code.CUMSUM, (whole,), g.element, whole.shape, attributes),)


@rule(Code.LINEAR_SCAN, mixes=True)
def _linear_scan(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    """h[i] = a[i] h[i-1] + x[i]. dx[i] = g[i] + a[i+1] dx[i+1], da[i] = dx[i] h[i-1].

    With s[i] = a[i] dx[i], which is s[i] = a[i] s[i+1] + a[i] g[i], the shifted a is not needed: dx[i] = g[i] + s[i+1].
    """
    shape = op.result.shape
    a, x = (b.whole(widened(b, primal(operand)), shape) for operand in op.operands)
    whole = b.whole(g, shape)
    along = {"axis": op.attributes["axis"], "reverse": op.attributes["reverse"]}
    back = {**along, "reverse": not along["reverse"]}
    later = b.pure(Code.LINEAR_SCAN_BEFORE, (a, b.mul(a, whole)), g.element, shape, back)
    dx = b.add(whole, later)
    before = b.pure(Code.LINEAR_SCAN_BEFORE, (a, x), g.element, shape, along)
    return b.mul(dx, before), dx
