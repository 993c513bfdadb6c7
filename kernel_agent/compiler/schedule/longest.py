"""`longest_first`: programs whose loops make the most trips start before the others.

Processors take programs in the order of their numbers, those of the first axis one after the other. Where a program's
trips grow with its number, as those of causal attention up to the diagonal, the longest would start when nothing is
left to be done beside them.
"""

from __future__ import annotations

from kernel_agent.compiler.schedule.mirror import mirrored
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

AXIS = 0
"""Of the grid: the one whose programs start one after the other."""


def longest_first(kernel: Kernel) -> Kernel:
    """The kernel with its programs numbered from the other end, where the trips of its loops of products grow with
    the number along the first axis; the same where that is not known."""
    loops = [
        op for op in kernel.ops if op.code is Code.FOR and any(inner.code is Code.DOT for inner in op.blocks[0].ops)
    ]
    numbers = [op.result for op in kernel.ops if op.code is Code.PROGRAM_ID and op.attributes["axis"] == AXIS]
    if not loops or len(numbers) != 1:
        return kernel
    trends = _Trends(numbers[0])
    grows = [trends.of(loop.operands[0]) == 0 and trends.of(loop.operands[1]) == 1 for loop in loops]
    shrinks = [trends.of(loop.operands[0]) != 0 and trends.of(loop.operands[1]) != 1 for loop in loops]
    return mirrored(kernel, frozenset((AXIS,))) if any(grows) and not any(shrinks) else kernel


class _Trends:
    """Whether values rise (1) or fall (-1) with a number, or are the same for all (0); None where that is not known."""

    def __init__(self, number: Value) -> None:
        self.known: dict[Value, int | None] = {number: 1}

    def of(self, value: Value) -> int | None:
        """Of an integer."""
        if value not in self.known:
            op = value.producer
            self.known[value] = 0 if op is None else self._of(op)
        return self.known[value]

    def _of(self, op: Op) -> int | None:
        found = [self.of(value) for value in op.operands]
        if not any(trend != 0 for trend in found):
            return 0 if not op.blocks else None
        if op.code in (Code.ADD, Code.MIN, Code.MAX):
            return _joined(*found)
        if op.code is Code.SUB:
            return _joined(found[0], None if found[1] is None else -found[1])
        if op.code is Code.CAST:
            return found[0]
        if op.code is Code.MUL and found[0] == 0:
            return found[1] if _is_size(op.operands[0]) else None
        if op.code in (Code.MUL, Code.FLOORDIV):
            return found[0] if _is_size(op.operands[1]) else None
        return None


def _is_size(value: Value) -> bool:
    """Whether a value is a positive constant; where launches choose it, it is the size of a tile."""
    op = value.producer
    return op is not None and op.code is Code.CONST and op.attributes["value"] > 0


def _joined(one: int | None, other: int | None) -> int | None:
    """Of a sum, and of the larger or the smaller of two."""
    if one is None or other is None or one * other < 0:
        return None
    return one or other
