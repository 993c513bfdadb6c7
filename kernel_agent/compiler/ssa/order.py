"""`forwards`: loops that run backwards only because the reverse of a loop does, run forwards where that adds up to the
same: they read like the forward's loops then, and can be joined with them."""

from __future__ import annotations

from typing import Any

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses, tapes_of
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk


def forwards(kernel: Kernel) -> Kernel:
    """A kernel whose `reverse` loops run forwards where the order of their trips does not matter but for rounding.

    It does not where all carries only add up what does not depend on them, no tape is loaded that is stored elsewhere,
    and memory is only added to, and not where the loop loads from.
    """
    return _Forwards(kernel).copy()


class _Forwards(Copier):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.uses = Uses.of(kernel)

    def attributes(self, op: Op) -> dict[str, Any]:
        if op.attributes["reverse"] and self._any_order(op):
            return {**op.attributes, "reverse": False}
        return op.attributes

    def _any_order(self, op: Op) -> bool:
        (block,) = op.blocks
        return (
            set(tapes_of(block, Code.TAPE_LOAD)) <= set(tapes_of(block, Code.TAPE_STORE))
            and only_adds(block)
            and all(adds_up(self.uses, op, place) for place in range(len(op.results)))
        )


def only_adds(block: Block) -> bool:
    """Whether a block's effects are additions to memory that it does not load from."""
    loaded = {op.base for op in walk(block) if op.code is Code.LOAD}
    for op in walk(block):
        if op.code in (Code.STORE, Code.ATOMIC, Code.LEAVE_IF) or (op.code is Code.ATOMIC_ADD and op.base in loaded):
            return False
    return True


def adds_up(uses: Uses, loop: Op, place: int) -> bool:
    """Whether a carry of a FOR only gets something added to it, or subtracted from it, that does not depend on it.

    On its way through the trip it may be a carry of loops within that adds up in turn.
    """
    (block,) = loop.blocks
    value: Value = block.arguments[1 + place]
    wanted = block.yields[place]
    while value is not wanted:
        if uses.count(value) != 1 or value in uses.yielded:
            return False
        (reader,) = uses[value]
        if reader.code is Code.ADD or (reader.code is Code.SUB and reader.operands[0] is value):
            value = reader.result
        elif reader.code is Code.FOR and value in reader.operands[3:]:
            inner = reader.operands.index(value) - 3
            if not adds_up(uses, reader, inner):
                return False
            value = reader.results[inner]
        else:
            return False
        if reader not in block.ops:
            return False
    return not uses[value] and block.yields.count(value) == 1
