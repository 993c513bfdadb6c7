"""The table of operations. A family of operations is one module that fills it on import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine
    from kernel_agent.ir.program import Op
    from kernel_agent.ir.values import Active, RuntimeValue

Rule = Callable[["Machine", "Op", "list[RuntimeValue]", "Active"], "Sequence[RuntimeValue]"]
"""(machine, op, operand values, active programs) -> one value per result."""

Pointwise = Callable[..., Any]
"""(op, *tensors) -> tensor, lane by lane; operands broadcast."""

RULES: dict[str, Rule] = {}
POINTWISE: dict[str, Pointwise] = {}
DERIVATIVES: dict[str, Callable[..., tuple[Tensor | float, ...]]] = {}
"""(result, *operands) -> one partial derivative per operand, for operations whose derivative can be infinite."""

AnyRule = TypeVar("AnyRule", bound=Callable[..., Any])


def rule(*names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a function as the rule of operations."""

    def register(function: AnyRule) -> AnyRule:
        for name in names:
            RULES[name] = function
        return function

    return register


def pointwise(*names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a lane-by-lane function of (op, *operands)."""

    def register(function: AnyRule) -> AnyRule:
        for name in names:
            POINTWISE[name] = function
        return function

    return register
