"""Which of a grid's axes a value depends on."""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


class Axes:
    """Of the values of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._behind: dict[Value, list[Value]] = {}
        """Argument of a block -> what it may be."""
        leaving: list[Value] = []
        self.used: frozenset[int] = frozenset()
        """Axes that the kernel asks for."""
        for op in kernel.ops:
            if op.code is Code.PROGRAM_ID:
                self.used |= {int(op.attributes["axis"])}
            elif op.code is Code.LEAVE_IF:
                leaving.append(op.operands[0])
            elif op.code is Code.FOR:
                (block,) = op.blocks
                self._behind[block.arguments[0]] = list(op.operands[:3])
                for carry, start, end in zip(block.arguments[1:], op.operands[3:], block.yields, strict=True):
                    self._behind[carry] = [start, end]
            elif op.code is Code.WHILE:
                test, body = op.blocks
                for carry, start, end in zip(test.arguments, op.operands, body.yields, strict=True):
                    self._behind[carry] = [start, end]
                for passed, given in zip(body.arguments, test.yields[1:], strict=True):
                    self._behind[passed] = [given]
        self.leaving = self.of(*leaving)
        """Axes that decide whether a program ends early."""

    def of(self, *values: Value) -> frozenset[int]:
        """Axes that any of some values may depend on."""
        seen: set[Value] = set()
        found: set[int] = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            op = value.producer
            if op is None:
                pending.extend(self._behind.get(value, ()))
            elif op.code is Code.PROGRAM_ID:
                found.add(int(op.attributes["axis"]))
            else:
                pending.extend(op.operands)
                for block in op.blocks:
                    pending.extend(block.yields)
        return frozenset(found)

    def around(self, parents: tuple[Op, ...]) -> frozenset[int]:
        """Axes that conditions and bounds around an access depend on."""
        return self.of(*(value for op in parents for value in op.operands[: 3 if op.code is Code.FOR else None]))
