"""`Sides`: operations of which a program does one or the other, as those of an early return or those behind it."""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op


class Sides:
    """The sides of conditions that the operations of a kernel stand in, down to loops: their trips may take both."""

    def __init__(self, kernel: Kernel) -> None:
        self._around: dict[Op, dict[Op, int]] = {}
        self._visit(kernel.body, {}, below=False)

    def apart(self, one: Op, other: Op) -> bool:
        """Whether no program does both."""
        taken = self._around[one]
        return any(taken.get(branch, side) != side for branch, side in self._around[other].items())

    def _visit(self, block: Block, around: dict[Op, int], *, below: bool) -> None:
        for op in block.ops:
            self._around[op] = around
            branches = op.code is Code.IF and not below
            for side, inner in enumerate(op.blocks):
                known = {**around, op: side} if branches else around
                self._visit(inner, known, below=below or op.code is not Code.IF)
