"""`lanewise`: along which axis values of a kernel go with an index, each lane of theirs by that lane of it alone.

Such a value can be had for other indices by putting these in: no lane knows of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Block, Op, Value, unspread

_ALONG = (Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.ARG_MAX, Code.ARG_MIN)
_SCANS = (Code.CUMSUM, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE)


class Lanewise:
    """Axes of values that depend on an index."""

    def __init__(self, index: Mapping[Value, int]) -> None:
        """`index`: values that are the index, or linear in it, with the axes along which it counts."""
        self.axes: dict[Value, int] = dict(index)
        """Of all values asked for, and of what they are made of, that depend on the index."""
        self.done: set[Op] = set()
        self.carried: set[Value] = set()
        """What loops carry: it goes with the index where it meets what does."""

    def ask(self, values: Iterable[Value]) -> None:
        """Find the axes of values. Raises CannotDerive where one mixes lanes of the index."""
        for value in values:
            self._value(value)

    def _value(self, value: Value) -> int | None:
        if value in self.axes:
            return self.axes[value]
        stack = [value]
        while stack:
            op = stack[-1].producer
            if op is None or op in self.done or stack[-1] in self.axes:
                stack.pop()
                continue
            needed = [v for v in _needs(op) if v.producer is not None and v.producer not in self.done]
            needed = [v for v in needed if v not in self.axes]
            if needed:
                stack += needed
                continue
            stack.pop()
            self.done.add(op)
            self._visit(op)
        return self.axes.get(value)

    def _visit(self, op: Op) -> None:
        axis = self._axis(op)
        if axis is not None:
            for result in op.results:
                self.axes.setdefault(result, axis)

    def _axis(self, op: Op) -> int | None:
        """Of an operation's results."""
        if op.code is Code.FOR:
            self._loop(op)
            return None
        if op.blocks:
            if any(value in self.axes for value in _needs(op)):
                raise _refusal(op)
            return None
        found = {self.axes[operand] for operand in op.operands if operand in self.axes}
        if not found:
            return None
        if op.code is Code.DOT:
            return self._dot(op)
        if len(found) > 1:
            raise _refusal(op)
        (axis,) = found
        if op.code in ELEMENTWISE or op.code is Code.LOAD:
            for operand in op.operands:
                if operand in self.carried:
                    self.axes.setdefault(operand, axis)
                elif operand not in self.axes and not _uniform(operand, axis):
                    raise _refusal(op)
            return axis
        if op.code in (Code.BROADCAST, Code.JOIN):
            return axis
        if op.code is Code.EXPAND:
            return axis + int(axis >= op.attributes["axis"])
        if op.code is Code.TRANS:
            return list[int](op.attributes["order"]).index(axis)
        if op.code in _ALONG and op.attributes["axis"] != axis:
            return axis - int(axis > op.attributes["axis"])
        if op.code in _SCANS and op.attributes["axis"] != axis:
            return axis
        raise _refusal(op)

    def _dot(self, op: Op) -> int:
        left, right = (self.axes.get(operand) for operand in op.operands)
        rank = len(op.result.shape)
        if left is not None and right is None and left != rank - 1:
            return left
        if right is not None and left is None and right != rank - 2:
            return right
        raise _refusal(op)

    def _loop(self, op: Op) -> None:
        """What a loop carries keeps its axis."""
        (block,) = op.blocks
        if any(operand in self.axes for operand in op.operands[:3]):
            raise _refusal(op)
        start = op.operands[3:]
        inner = block.arguments[1:]
        self.carried.update(inner)
        known = -1
        while known != len(self.axes):
            known = len(self.axes)
            for value, before, after in zip(inner, start, block.yields, strict=True):
                for one in (before, after):
                    if one in self.axes:
                        self.axes.setdefault(value, self.axes[one])
            self._forget(block)
            self.ask(block.yields)
        for result, value, before, after in zip(op.results, inner, start, block.yields, strict=True):
            if value in self.axes:
                axis = self.axes[result] = self.axes[value]
                if any(self.axes.get(one, axis) != axis for one in (before, after)):
                    raise _refusal(op)
                if any(one not in self.axes and not _uniform(one, axis) for one in (before, after)):
                    raise _refusal(op)

    def _forget(self, block: Block) -> None:
        """Visit the operations of a loop again, now that more is known of what it carries."""
        for op in block.ops:
            self.done.discard(op)
            for inner in op.blocks:
                self._forget(inner)


def _uniform(value: Value, axis: int) -> bool:
    """Whether all lanes along an axis are surely the same."""
    shape = unspread(value).shape
    return len(shape) <= axis or shape[axis] == 1


def _needs(op: Op) -> list[Value]:
    """What an operation reads, what its blocks read of outside included."""
    return [*op.operands, *captured(op.blocks)]


def _refusal(op: Op) -> CannotDerive:
    return CannotDerive(f"`{op.code.value}` mixes lanes of what would be moved")
