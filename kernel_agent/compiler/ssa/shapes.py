"""The shape of an operation's results, from those of its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.value import broadcast_shape

Shape = tuple[int, ...]

OF_AXIS = frozenset(
    (Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.ARG_MAX, Code.ARG_MIN, Code.REDUCE, Code.CUMSUM, Code.SCAN,
     Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE, Code.FLIP, Code.GATHER)
)  # fmt: skip
"""What works along an axis, which its operands must have in full."""
WHOLE = OF_AXIS | {Code.RESHAPE, Code.JOIN, Code.SPLIT, Code.DOT}
"""What an operand must not broadcast in: its extents are part of the meaning."""


def result_shape(code: Code, shapes: Sequence[Shape], attributes: Mapping[str, Any], given: Shape) -> Shape:
    """Of every result of an operation that is no access and has no control flow; `given` where it is free to choose.

    Raises ValueError or IndexError where operands do not go together.
    """
    if code in ELEMENTWISE:
        return broadcast_shape(shapes)
    if code is Code.ARANGE:
        return (attributes["end"] - attributes["start"],)
    if code in (Code.CONST, Code.PROGRAM_ID, Code.NUM_PROGRAMS):
        return ()
    if code not in WHOLE | {Code.EXPAND, Code.TRANS}:
        return given
    first = shapes[0]
    if code is Code.EXPAND:
        return (*first[: attributes["axis"]], 1, *first[attributes["axis"] :]) if first else ()
    if code is Code.TRANS:
        return tuple(first[axis] for axis in attributes["order"]) if first else ()
    if code is Code.JOIN:
        return (*first, 2)
    if code is Code.SPLIT:
        return first[:-1]
    if code is Code.DOT:
        return (*first[:-1], shapes[1][-1])
    if code is Code.GATHER:
        return shapes[1]
    if code is Code.RESHAPE:
        return given
    axis = attributes["axis"]
    if not 0 <= axis < len(first):
        raise IndexError(f"{first} has no axis {axis}")
    if code in (Code.CUMSUM, Code.SCAN, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE, Code.FLIP):
        return broadcast_shape(shapes)
    return (*first[:axis], *first[axis + 1 :])
