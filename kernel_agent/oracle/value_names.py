"""What the user calls a value: Triton keeps the name of a variable, but loses it at loops and changes of layout."""

from __future__ import annotations

from functools import cached_property

from kernel_agent.ir.program import Module, Op, Value

_SAME = frozenset(
    {
        *("tt.expand_dims", "tt.broadcast", "tt.splat", "tt.trans", "tt.reshape", "tt.unsplat"),
        *("arith.extf", "arith.truncf", "arith.bitcast", "ttg.convert_layout"),
    }
)
"""Operations that leave the numbers as they are."""


class Names:
    """Names and lines of the values of one kernel."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def variable(self, value: Value) -> str:
        """The variable that holds a value, or held it before its layout changed.

        Empty where the code has none: Triton names the parts of an expression after what the whole is assigned to.
        """
        name = self._named(value)
        if name and self._makers.get(value.id) is not None and not self._read_elsewhere(value):
            return ""
        return name

    def _read_elsewhere(self, value: Value) -> bool:
        """Whether a line other than the one that computes a value reads it, or it leaves its block."""
        line = self.line(value)
        source = self._before_layout(value)
        waiting = [source]
        while waiting:
            current = waiting.pop()
            for op in self._readers.get(current.id, ()):
                if op.name in _SAME:
                    waiting += op.results
                elif op.name.endswith((".yield", ".return")) or self.line_of(op) != line:
                    return True
        return False

    def _before_layout(self, value: Value) -> Value:
        maker = self._makers.get(value.id)
        return self._before_layout(maker[0].operands[0]) if maker is not None and maker[0].name in _SAME else value

    def _named(self, value: Value) -> str:
        maker = self._makers.get(value.id)
        if maker is None:
            return value.variable
        op, position = maker
        if op.name in _SAME:
            return self._named(op.operands[0]) or value.variable
        if op.name == "scf.for":
            return op.regions[0][0].arguments[1 + position].variable or value.variable
        if op.name == "scf.if":
            return self._named(op.regions[0][0].ops[-1].operands[position]) or value.variable
        return value.variable

    def line(self, value: Value) -> int | None:
        """Where a value is computed, before its layout changed; None for an argument."""
        maker = self._makers.get(value.id)
        if maker is None:
            return None
        op, _ = maker
        if op.name in _SAME:
            return self.line(op.operands[0])
        return self.line_of(op)

    def line_of(self, op: Op) -> int | None:
        """The line of an operation in the user's own code."""
        place = self.module.place(op)
        return None if place is None else place.line

    @cached_property
    def _readers(self) -> dict[int, list[Op]]:
        found: dict[int, list[Op]] = {}
        for op in self.module.all_ops:
            for operand in op.operands:
                found.setdefault(operand.id, []).append(op)
        return found

    @cached_property
    def _makers(self) -> dict[int, tuple[Op, int]]:
        return {result.id: (op, k) for op in self.module.all_ops for k, result in enumerate(op.results)}
