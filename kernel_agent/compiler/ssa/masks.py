"""What a mask says: `conjuncts`, conditions that all hold where it does, and what is `implied`, of alternatives too."""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value, unspread


def conjuncts(mask: Value) -> list[Value]:
    """Conditions that must all hold."""
    op = mask.producer
    if op is not None and op.code is Code.AND:
        return [part for operand in op.operands for part in conjuncts(operand)]
    return [mask]


def repeated_conjuncts(mask: Value) -> list[Value]:
    """The same, looking into what a mask repeats: a scalar or a smaller tile may be of several conditions, too."""
    op = unspread(mask).producer
    if op is not None and op.code is Code.AND:
        return [part for operand in op.operands for part in repeated_conjuncts(operand)]
    return [mask]


def implied(mask: Value) -> list[Value]:
    """Conditions that must hold where a mask does: of alternatives what all of them ask for."""
    op = mask.producer
    if op is not None and op.code is Code.OR:
        one, other = (implied(operand) for operand in op.operands)
        return [part for part in one if part in other]
    if op is not None and op.code is Code.AND:
        return list(dict.fromkeys(part for operand in op.operands for part in implied(operand)))
    return [mask]
