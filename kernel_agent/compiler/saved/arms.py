"""`kept_arms`: choices of which only one arm is ever stored, as `where(row < rows, norm, 1.0)` under a mask of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernel_agent.compiler.saved.lanes import Lanes
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, constant


def kept_arms(kernel: Kernel) -> dict[Value, Value]:
    """By result of a SELECT, the arm that has to do with what is stored; the other one is a number, for lanes of which
    nothing is stored."""
    found: dict[Value, Value] = {}
    lanes: Lanes | None = None
    for op in kernel.ops:
        if op.code is not Code.SELECT or not op.result.is_float:
            continue
        condition, arm, other = op.operands
        number = constant(bare(other))
        if number is None or number == 0 or math.isinf(number) or len(condition.shape) != len(op.result.shape):
            continue
        lanes = lanes or Lanes(kernel)
        if lanes.confined(op.result, condition) and not _steers(kernel, op.result):
            found[op.result] = arm
    return found


def _steers(kernel: Kernel, value: Value) -> bool:
    """Whether what runs, or where something is stored, may depend on a value."""
    reached, before = {value}, 0
    while len(reached) > before:
        before = len(reached)
        for op in kernel.ops:
            if op.code is Code.FOR:
                reached |= _handed_on(op, reached)
                continue
            yields = [last for block in op.blocks for last in block.yields]
            if not reached.isdisjoint((*op.operands, *captured(op.blocks), *yields)):
                reached.update(op.results)
                reached.update(argument for block in op.blocks for argument in block.arguments)
    return any(operand in reached for op in kernel.ops for operand in _steering(op))


def _handed_on(loop: Op, reached: set[Value]) -> set[Value]:
    """What a FOR makes of values: an index of bounds, carries and results of starts and of what trips yield."""
    (block,) = loop.blocks
    index, *carries = block.arguments
    found = {index, *loop.results, *carries} if not reached.isdisjoint(loop.operands[:3]) else set()
    for parts in zip(loop.operands[3:], block.yields, carries, loop.results, strict=True):
        if not reached.isdisjoint(parts):
            found.update(parts[2:])
    return found


def _steering(op: Op) -> Iterator[Value]:
    """What an operation stores to, and whether it runs."""
    if op.code in (Code.STORE, Code.ATOMIC_ADD) and op.stored.is_float:
        yield from (operand for operand in op.operands if operand is not op.stored)
    elif op.code in EFFECTS:
        yield from op.operands
    elif op.code is Code.FOR:
        yield from op.operands[:3]
    elif op.code is Code.IF:
        yield op.operands[0]
    elif op.code is Code.WHILE:
        yield from (*op.operands, *captured(op.blocks), *op.blocks[0].yields)
