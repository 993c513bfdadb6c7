"""Gradients of a forward whose maxima count as constants, as backwards take them that recompute a softmax.

Autograd differentiates the maximum that a softmax subtracts, and what that adds to a gradient is zero. With rounding it
is more: it takes what the scores of a row are off by together back from the largest of them, so that a row with one
key has a gradient of exactly zero in every computation. A backward that is written by hand leaves the maximum out, and
what its products round stays in such a row. Both are honest arithmetic where the exact gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kernel_agent.ir.execution import ExecOptions, Execution, run_once
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.values import Active, RuntimeValue

_EXTREMES = frozenset({"arith.maxnumf", "arith.maximumf", "arith.minnumf", "arith.minimumf"})


@dataclass
class HeldMaxima:
    """Cuts the graph behind every maximum and minimum of a kernel."""

    found: int = 0
    """Results that a derivative would have gone through."""

    def execute(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        leaves: Collection[int | str],
        options: ExecOptions,
    ) -> Execution:
        """As the executor's own."""
        for safe in (False, True):
            execution, tame = run_once(function, args, kwargs, leaves, options, safe=safe, runner=self._launch)
            if tame:
                break
        return execution

    def compute(
        self, module: Module, op: Op, operands: list[Any], active: Active, run: Callable[..., Any]
    ) -> list[Any]:
        """See `Around`."""
        del module
        results = list(run(op, operands, active))
        return [self._held(result) for result in results] if _is_extreme(op) else results

    def _held(self, result: RuntimeValue) -> RuntimeValue:
        if not (isinstance(result, Tensor) and result.requires_grad):
            return result
        self.found += 1
        return result.detach()

    def _launch(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        launch(module, grid, arguments, buffers, findings, replace(options, edges=self))


def _is_extreme(op: Op) -> bool:
    """Whether an operation is a maximum or a minimum, of two tiles or along an axis."""
    if op.name != "tt.reduce":
        return op.name in _EXTREMES
    return any(inner.name in _EXTREMES for block in op.regions[0] for inner in block.ops)
