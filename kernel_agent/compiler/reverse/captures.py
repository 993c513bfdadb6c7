"""Cotangents that a nested block has for values from outside of it."""

from __future__ import annotations

from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.ssa.value import Block, Value


def taken_from_outside(found: Cotangents, *blocks: Block) -> dict[Value, Value]:
    """Cotangents of values that none of the blocks defines itself."""
    own: set[Value] = set()
    for block in blocks:
        own.update(block.arguments)
        own.update(result for op in block.ops for result in op.results)
    return {value: g for value, g in found.found.items() if value not in own}
