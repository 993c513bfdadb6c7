"""Watches for derivatives that are infinite or undefined, so that nobody has to try a backward pass to find out.

Only where a zero cotangent meets such a derivative (0 x inf = NaN) does safe mode change a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernel_agent.ir.operations.registry import DERIVATIVES
from kernel_agent.ir.program import Op

_FOLD_AT = 4096


class Slopes:
    """Sums of all partial derivatives that safe mode would guard in one execution."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def watch(self, op: Op, result: Tensor, operands: list[Tensor]) -> None:
        """Note the partial derivatives of an operation of `DERIVATIVES`. Nothing is asked of the device yet."""
        if torch.is_grad_enabled() and not result.requires_grad:
            return  # without recording, as in the first run of a checkpoint, every result may be differentiated later
        with torch.no_grad():
            self.note(DERIVATIVES[op.name](result, *operands))

    def note(self, slopes: Iterable[Tensor | float | None]) -> None:
        """Note partial derivatives."""
        self._sums += [slope.sum() for slope in slopes if isinstance(slope, Tensor)]
        if len(self._sums) > _FOLD_AT:
            self._sums = [torch.stack(self._sums).sum()]

    def all_finite(self) -> bool:
        """Whether every derivative was finite; sums that overflow count as infinite."""
        return not self._sums or bool(torch.stack(self._sums).sum().isfinite())
