"""`mirrored`: programs numbered from the other end of an axis, as kernels number them that start with the longest rows.

Which program has which part does not matter for what is computed, but proofs want numbers that rise; and a kernel that
keeps the forward's grid is numbered back, since its rows are as long as the forward's.
"""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_constant

NAMES = ("pid", "pid_y", "pid_z")
"""Of numbers that the forward gave none, by axis."""


def reversed_axes(kernel: Kernel) -> frozenset[int]:
    """Axes of the grid whose numbers a kernel only reads as `tl.num_programs(axis) - 1 - tl.program_id(axis)`."""
    uses = Uses.of(kernel)
    numbers = [op for op in kernel.ops if op.code is Code.PROGRAM_ID]
    found = {
        op.attributes["axis"]: [_from_end(reader, op.result) for reader in uses[op.result]] or [False] for op in numbers
    }
    return frozenset(axis for axis, all_from_end in found.items() if all(all_from_end))


def mirrored(kernel: Kernel, axes: frozenset[int]) -> Kernel:
    """The kernel whose programs along some axes do what those at the other end did."""
    return prune(_Mirror(kernel, axes).copy()) if axes else kernel


def _from_end(op: Op, number: Value) -> bool:
    """Whether an operation is num_programs - 1 - number."""
    if op.code is not Code.SUB or op.operands[1] is not number:
        return False
    last = op.operands[0].producer
    if last is None or last.code not in (Code.SUB, Code.ADD):
        return False
    one = 1 if last.code is Code.SUB else -1
    return any(
        _counts(count, number) and is_constant(other, one)
        for count, other in ((last.operands[0], last.operands[1]), *([last.operands[::-1]] if one < 0 else []))
    )


def _counts(value: Value, number: Value) -> bool:
    """Whether a value is the number of programs along the axis of one of their numbers."""
    op, axis = value.producer, number.producer
    if op is None or axis is None:
        return False
    return op.code is Code.NUM_PROGRAMS and op.attributes["axis"] == axis.attributes["axis"]


class _Mirror(Copier):
    """Numbers from the other end."""

    def __init__(self, source: Kernel, axes: frozenset[int]) -> None:
        super().__init__(source)
        self.axes = axes

    def pure(self, op: Op) -> None:
        """Numbers of programs, and what is already counted from the end."""
        b = self.b
        number = op.operands[1].producer if op.code is Code.SUB else None
        numbered = number is not None and number.code is Code.PROGRAM_ID and number.attributes["axis"] in self.axes
        if number is not None and numbered and _from_end(op, number.result):
            self[op.result] = b.program_id(number.attributes["axis"], op.result.name)
            return
        if op.code is Code.PROGRAM_ID and op.attributes["axis"] in self.axes:
            axis = op.attributes["axis"]
            last = b.sub(b.num_programs(axis), b.const(1))
            found = b.sub(last, b.program_id(axis))
            found.name = found.name or op.result.name or NAMES[axis]
            self[op.result] = found
            return
        super().pure(op)
