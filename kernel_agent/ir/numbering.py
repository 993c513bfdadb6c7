"""`Numbering`: kernels by their first launch, operations by where they stand: the same numbers in every execution."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_agent.ir.program import Module, Op


@dataclass(eq=False)
class Numbering:
    """Grows as kernels are met."""

    modules: list[Module] = field(default_factory=list)
    """The kernels in the order of their first launches."""
    _numbers: dict[int, int] = field(default_factory=dict)

    def of(self, module: Module, op: Op) -> tuple[int, int]:
        """The number of a kernel, and of one of its operations: its position in `Module.all_ops`."""
        if id(module) not in self._numbers:
            self._numbers[id(module)] = len(self.modules)
            self.modules.append(module)
        return self._numbers[id(module)], module.positions[id(op)]
