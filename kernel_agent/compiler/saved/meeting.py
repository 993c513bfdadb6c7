"""`met`: how the lanes of an online softmax, each with a maximum of its own, meet behind its loop.

A lane ends with the largest number m that it saw and the sum l of exp(x - m). The largest of the maxima, M, and the sum
of l * exp(m - M) are those of all lanes together.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.saved.trip import vanishes
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Value, bare

EXPONENTIALS = (Code.EXP, Code.EXP2)


@dataclass(frozen=True)
class Meeting:
    """Of lanes along an axis."""

    axis: int
    highest: Value
    """Of their maxima."""
    mass: Value
    """Of all together."""
    of_each: Value
    """The mass that a lane has."""
    factor: Value
    """By which that is multiplied; 1 in a lane that has the highest maximum."""


def met(block: Block, maximum: Value, mass: Value) -> Meeting | None:
    """How a mass is the sum of those of lanes that have these maxima, in the block behind the loop; None where it is
    something else."""
    total = bare(mass).producer
    product = None if total is None or total.code is not Code.SUM else bare(total.operands[0]).producer
    if total is None or product is None or product.code is not Code.MUL:
        return None
    axis = total.attributes["axis"]
    for op in block.ops:
        if op.code is not Code.REDUCE_MAX or op.attributes["axis"] != axis or bare(op.operands[0]) is not maximum:
            continue
        forms = frozenset(value for other in block.ops for value in other.results if bare(value) is op.result)
        for of_each, factor in (product.operands, product.operands[::-1]):
            power = bare(factor).producer
            if power is not None and power.code in EXPONENTIALS and vanishes(power.operands[0], maximum, forms):
                return Meeting(axis, op.result, bare(mass), bare(of_each), bare(factor))
    return None
