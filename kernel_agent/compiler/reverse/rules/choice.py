"""Choices and conversions."""

from __future__ import annotations

from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.reverse.rules.registry import Found, Primal, rule
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@rule(Code.SELECT)
def _select(b: Builder, op: Op, primal: Primal, g: Value) -> Found:
    condition = primal(op.operands[0])
    zero = b.zero(g)
    return None, b.select(condition, g, zero), b.select(condition, zero, g)


@rule(Code.CAST)
def _cast(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    """Rounding has the derivative one."""
    source = op.operands[0]
    return (b.cast(g, adjoint_element(source.element)) if source.is_float else None,)


@rule(Code.KNOWN)
def _known(b: Builder, op: Op, primal: Primal, g: Value) -> Found:  # noqa: ARG001
    return g, None
