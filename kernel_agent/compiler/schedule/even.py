"""`evened`: masks of rows that ask nothing where the rows are whole tiles, as a constexpr says.

Of tiles of one row, as long rows have them, every row is inside; Triton does not know it, and keeps a predicate for
each element of each load and store. Rows that fill the registers are spilled for that.
"""

from __future__ import annotations

from kernel_agent.compiler.schedule.switched import Switched
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


def evened(kernel: Kernel, stages: str, trips: str, name: str) -> Switched | None:
    """The kernel with a constexpr `name`: whether its rows are whole tiles. None where no mask of rows is found.

    `stages`: the constexpr of the loop over tiles of rows; `trips`: the expression of how many there are.
    """
    for op in kernel.body.ops:
        if op.code is not Code.FOR or op.attributes.get("num_stages") != stages:
            continue
        (block,) = op.blocks
        asked = {inner: found for inner in block.ops if (found := _rows_of(inner, block.arguments[0])) is not None}
        if asked:
            return Switched.of(
                kernel, {inner: f"{trips} * {step} <= {size}" for inner, (size, step) in asked.items()}, name
            )
    return None


def _rows_of(op: Op, index: Value) -> tuple[str, str] | None:
    """The number of rows and the rows of a tile, where an operation is `index * step + arange(step) < rows`."""
    if op.code is not Code.CMP or op.attributes["predicate"] != "lt" or op.attributes.get("unsigned"):
        return None
    rows, size = op.operands
    total = rows.producer
    if size.producer is not None or size.shape or total is None or total.code is not Code.ADD:
        return None
    for start, lanes in (total.operands, total.operands[::-1]):
        times, arange = start.producer, lanes.producer
        if times is None or arange is None or times.code is not Code.MUL or arange.code is not Code.ARANGE:
            continue
        for number, step in (times.operands, times.operands[::-1]):
            const = step.producer
            if number is not index or const is None or const.code is not Code.CONST or arange.attributes["start"]:
                continue
            symbol = const.attributes["symbol"]
            if symbol and symbol == arange.attributes["symbol"]:
                return size.name, symbol
    return None
