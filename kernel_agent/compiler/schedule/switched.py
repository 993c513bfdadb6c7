"""`Switched`: a kernel with comparisons that hold wherever one constexpr of its launch is true.

Whoever adds the constexpr knows when all lanes of these comparisons hold: `even` of tiles of rows, `whole` of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op


@dataclass(frozen=True)
class Switched:
    """A kernel with one more constexpr."""

    kernel: Kernel
    condition: str
    """Expression of it at a launch."""

    @classmethod
    def of(cls, kernel: Kernel, asked: Mapping[Op, str], name: str) -> Switched | None:
        """The kernel with the constexpr `name`; None where nothing is asked.

        `asked`: comparisons, and when all lanes of each hold."""
        if not asked:
            return None
        return cls(_Switcher(kernel, asked, name).copy(), " and ".join(dict.fromkeys(asked.values())))


class _Switcher(Copier):
    """Copies a kernel, with the constexpr beside comparisons."""

    def __init__(self, source: Kernel, asked: Mapping[Op, str], name: str) -> None:
        super().__init__(source)
        self.asked = asked
        self.name = name
        self.b.kernel.constants[name] = False

    def pure(self, op: Op) -> None:
        """A comparison."""
        super().pure(op)
        if op in self.asked and not self.slicing:
            sides = (self[op.result], self.b.setting(self.name, value=False))
            self[op.result] = self.b.elementwise(Code.OR, sides, name=op.result.name)
