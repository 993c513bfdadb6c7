"""`Variables`: which values share a variable, so that a loop's accumulator is one name before, in and after the loop.

A value may take over the variable of another only where the other is not read any more: every read of the text
counts, those by expressions that are printed later included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_agent.compiler.emit.places import Places
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value


@dataclass(eq=False)
class Variable:
    """What a name stands for in one part of the text."""

    values: list[Value] = field(default_factory=list)
    name: str = ""


class Variables:
    """The variable of every value that is no part of an expression and no parameter."""

    def __init__(self, kernel: Kernel, places: Places) -> None:
        self.places = places
        self.of: dict[Value, Variable] = {}
        self._block(kernel.body)

    def _block(self, block: Block) -> None:
        for op in block.ops:
            if op not in self.places.needed:
                continue
            if op.code is Code.FOR:
                self._loop(op, block, op.operands[3:], op.blocks[0].arguments[1:])
                self._new(op.blocks[0].arguments[0])
                self._block(op.blocks[0])
                self._yields(op.blocks[0], op.results)
            elif op.code is Code.WHILE:
                if op.blocks[0].yields[1:] != op.blocks[0].arguments:
                    raise needs_statements()
                self._loop(op, block, op.operands, op.blocks[0].arguments)
                for value, passed in zip(op.blocks[1].arguments, op.results, strict=True):
                    self._join(value, self.of[passed])
                for inner in op.blocks:
                    self._block(inner)
                self._yields(op.blocks[1], op.results)
            elif op.code is Code.IF:
                self._branch(op, block)
            else:
                for value in op.results:
                    if value not in self.places.inlined:
                        self._new(value)

    def _new(self, value: Value) -> Variable:
        variable = Variable()
        self._join(value, variable)
        return variable

    def _join(self, value: Value, variable: Variable) -> None:
        variable.values.append(value)
        self.of[value] = variable

    def _own(self, value: Value, block: Block) -> bool:
        """Whether a value has a variable, and came about in the block itself: not one loop further out."""
        return value in self.of and self.places.block_of[value] is block

    def _loop(self, op: Op, block: Block, initial: tuple[Value, ...], carries: list[Value]) -> None:
        """Carries and results take over what starts them, where nobody else reads that."""
        taken: set[Variable] = set()
        for start, carry, result in zip(initial, carries, op.results, strict=True):
            over = self._own(start, block) and max(self.places.read_at[start]) <= self.places.at[op]
            variable = self.of[start] if over and self.of[start] not in taken else Variable()
            taken.add(variable)
            self._join(carry, variable)
            self._join(result, variable)

    def _yields(self, block: Block, results: tuple[Value, ...]) -> None:
        """What a block yields is assigned to the result's variable at once, where its old value is read no more."""
        for value, result in zip(block.yields, results, strict=True):
            variable = self.of[result]
            op = value.producer
            if op is None or op.code in CONTROL or len(op.results) > 1:
                continue
            if not self._own(value, block) or self.of[value] is variable or len(self.of[value].values) > 1:
                continue
            place = self.places.at[op]
            if all(self._last_read(old, block) <= place for old in variable.values if old is not result):
                self._join(value, variable)

    def _last_read(self, value: Value, block: Block) -> int:
        """The last read of a value within a block."""
        end = self.places.end[block]
        start = min((self.places.at[op] for op in block.ops), default=end)
        return max((place for place in self.places.read_at[value] if start <= place <= end), default=-1)

    def _branch(self, op: Op, block: Block) -> None:
        after = max(self.places.end[inner] for inner in op.blocks)
        taken: set[Variable] = set()
        for n, result in enumerate(op.results):
            found = Variable()
            for inner in op.blocks:
                value = inner.yields[n]
                dead = self._own(value, block) and max(self.places.read_at[value]) <= after
                if dead and self.of[value] not in taken and value.shape == result.shape:
                    found = self.of[value]
                    break
            taken.add(found)
            self._join(result, found)
        for inner in op.blocks:
            self._block(inner)
            self._yields(inner, op.results)


def needs_statements() -> CannotDerive:
    """The refusal of a WHILE whose test makes more than a condition of what is carried."""
    return CannotDerive(
        "a while loop whose condition needs statements of its own cannot be printed",
        remedy="Compute the condition in the loop's body, and let the loop test a variable.",
    )
