"""`spares_loads`: sums that were stored as they are, of tiles that nothing else reads, as a residual stream.

Its derivative asks for none of the summands: the sum is one load instead of several. That holds of no sum which the
store has rounded.
"""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Op, Value

_LINEAR = frozenset((Code.ADD, Code.SUB, Code.NEG, Code.CAST))


def spares_loads(value: Value, uses: Uses) -> bool:
    """Whether a value is the sum of several tiles that are loaded for it alone."""
    if not value.is_float:
        return False
    inside: set[Op] = set()
    loads: dict[Value, None] = {}
    stack = [value]
    while stack:
        part = stack.pop()
        op = part.producer
        if op is not None and op.code in _LINEAR and op not in inside and part.shape == value.shape:
            inside.add(op)
            stack.extend(op.operands)
        elif op is not None and op.code is Code.LOAD and part.shape == value.shape:
            loads[part] = None
        elif part.shape == value.shape and part.shape:
            return False  # its own derivative, or another reader, may ask for what it is made of
    alone = [load for load in loads if all(user in inside for user in uses[load])]
    return len(alone) > 1 and len(alone) == len(loads)
