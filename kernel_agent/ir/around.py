"""What may take the place of the computation of every operation of a launch: to gate, to change, or to look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.values import Active


class Around(Protocol):
    """Computes operations by way of the machine's own function."""

    def compute(
        self, module: Module, op: Op, operands: list[Any], active: Active, run: Callable[..., Any]
    ) -> list[Any]:
        """The results of one operation; `run(op, operands, active)` is `Machine.apply`."""
