"""`at_hand`: whether a stored sum is made of what the derivative loads anyway, so that reading the sum would be more.

A launch that stores one over the length of each short row and nothing else, as a norm inside of attention, has a
derivative that takes every element of the row. The sum of their squares costs no memory then, while the stored numbers
are read for each row: of 64 elements in 16 bits three percent.
"""

from __future__ import annotations

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.uses import computed_of
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, beneath

SHORT = 128
"""Elements of a row that has few enough."""
_WIDENED = frozenset((Code.CAST,))
_OTHER = CONTROL | {Code.ATOMIC_ADD, Code.ATOMIC, Code.STORE_BLOCK, Code.DOT}
"""What a launch of sums of squares has none of."""


def at_hand(kernel: Kernel, calls: Calls | None) -> bool:
    """Whether all that a kernel stores are numbers of short rows, each made of the sum of the row's squares."""
    if any(op.code in _OTHER for op in kernel.ops):
        return False
    stored = [op.stored for op in kernel.body.ops if op.code is Code.STORE]
    return bool(stored) and all(_is_length(kernel, value, calls) for value in stored)


def _is_length(kernel: Kernel, value: Value, calls: Calls | None) -> bool:
    """Whether a number is computed of the squares of a short row that is loaded, and of nothing else that is."""
    parts = [part.producer for part in computed_of(value, down_to=_is_sum) if part.producer is not None]
    sums = [op for op in parts if op.code is Code.SUM]
    if len(sums) != 1 or any(op.blocks or op.code is Code.LOAD for op in parts):
        return False
    (total,) = sums
    extent = total.operands[0].shape[total.attributes["axis"]]
    name = kernel.extents.get(extent)
    size = calls.foreseen(name) if calls is not None and name else extent
    return total.result.shape == value.shape and size is not None and size <= SHORT and _is_squared(total)


def _is_sum(value: Value) -> bool:
    return value.producer is not None and value.producer.code is Code.SUM


def _is_squared(total: Op) -> bool:
    """Whether a sum is of squares of elements that are loaded."""
    square = total.operands[0].producer
    if square is None or square.code is not Code.MUL or square.operands[0] is not square.operands[1]:
        return False
    loaded = beneath(square.operands[0], _WIDENED).producer
    return loaded is not None and loaded.code is Code.LOAD and loaded.result.shape == total.operands[0].shape
