"""`resized`: a kernel of index arithmetic at the constexprs of a call, which may be others than it was lowered for.

Kernels are lowered for tiles of sizes that tell their names apart. What a call does to memory with tiles of its own is
another question: programs that are 16 rows apart meet if each has 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_agent.compiler.ssa.code import CONTROL, EFFECTS, ELEMENTWISE, REDUCTIONS, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_setting

_SPREADS = frozenset((Code.FULL, Code.BROADCAST))
_KEEPS = (
    CONTROL
    | EFFECTS
    | ELEMENTWISE
    | REDUCTIONS
    | {Code.CUMSUM, Code.FLIP, Code.LOAD, Code.EXPAND, Code.TRANS, Code.PROGRAM_ID, Code.NUM_PROGRAMS, Code.CONST}
)
"""What takes its shape from its operands."""


def resized(kernel: Kernel, names: Mapping[str, Any]) -> Kernel:
    """The kernel, or itself where an operation has a shape of its own. `names`: what expressions over constexprs may
    name; those that name something else stay as they are."""
    if any(op.code not in _KEEPS | _SPREADS and op.code is not Code.ARANGE for op in kernel.ops):
        return kernel
    return _Resized(kernel, names).copy()


class _Resized(Copier):
    """Numbers that the source calls by constexprs are those of the call."""

    def __init__(self, source: Kernel, names: Mapping[str, Any]) -> None:
        super().__init__(source)
        self.names = names

    def whole(self, old: Value) -> Value:
        """Tiles are spread where they meet others."""
        return self[old]

    def pure(self, op: Op) -> None:
        """A number, or lanes."""
        symbol = op.attributes.get("symbol")
        if op.code in _SPREADS:
            self[op.result] = self[op.operands[0]]
        elif op.code is Code.ARANGE:
            start, end = op.attributes["start"], op.attributes["end"]
            self[op.result] = self.b.arange(start, start + self._number(symbol, end - start))
        elif op.code is Code.CONST and symbol and op.result.element != "i1" and not is_setting(op.result):
            number = self._number(symbol, op.attributes["value"])
            self[op.result] = self.b.const(number, op.result.element)
        else:
            super().pure(op)

    def _number(self, symbol: str | None, present: Any) -> Any:
        """What an expression is in the call; what it is here where the call does not say."""
        try:
            return type(present)(eval(symbol, dict(self.names))) if symbol else present
        except (NameError, TypeError, AttributeError, ZeroDivisionError):
            return present
