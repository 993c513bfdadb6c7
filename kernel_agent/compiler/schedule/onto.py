"""`onto`: products that a loop takes a number of each row from begin with that number instead of zero.

A product adds to what its registers hold: what begins at `-delta` is `dO @ V' - delta` when it is done, and no
instruction waits for it to subtract. That holds for numbers that all trips share and that each thread has one or two
of: those of rows. Numbers of columns, one for nearly every element that a thread holds, would be copied in every trip.
"""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


def onto(kernel: Kernel) -> Kernel:
    """A kernel whose loops subtract no number of a row from a product that nothing else reads."""
    uses = Uses.of(kernel)
    found: dict[Op, Value] = {}
    for loop in kernel.ops:
        if loop.code is Code.FOR:
            inner = loop.blocks[0].arguments[0].depth
            found |= {op: op.operands[1] for op in loop.blocks[0].ops if _takes_row(op, uses, inner)}
    return _Onto(kernel, found).copy() if found else kernel


def _takes_row(op: Op, uses: Uses, inner: int) -> bool:
    """Whether an operation is a product less what all trips of the loop whose body is at `inner` take off its rows."""
    if op.code is not Code.SUB or op.result.element != "f32":
        return False
    product, row = op.operands
    made, spread = product.producer, row.producer
    if made is None or made.code is not Code.DOT or uses[product] != (op,) or product in uses.yielded:
        return False
    return spread is not None and spread.code is Code.EXPAND and spread.attributes["axis"] == 1 and row.depth < inner


class _Onto(Copier):
    """Copies a kernel, with sums for differences."""

    def __init__(self, source: Kernel, rows: dict[Op, Value]) -> None:
        super().__init__(source)
        self.rows = rows

    def pure(self, op: Op) -> None:
        """Differences."""
        row = self.rows.get(op)
        if row is None:
            super().pure(op)
            return
        b = self.b
        name, b.hint = b.hint, f"minus_{row.name}" if row.name else ""
        start = b.whole(b.neg(self[row]), op.result.shape)
        b.hint = name
        self[op.result] = b.add(start, self[op.operands[0]])
