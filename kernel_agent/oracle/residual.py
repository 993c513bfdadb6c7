"""How well a residual is explained: the least-squares factor of a direction, and what it leaves over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-6
"""Left-over norm over the norm of the residual, up to which a fit counts as an explanation."""
ENOUGH = 8
"""Elements that must not vanish before one free factor explains anything by being found in a single case."""


@dataclass(frozen=True)
class Fit:
    """residual = factor * direction + what is left over."""

    factor: float
    left_over: float
    """Norm of what is left over, in norms of the residual."""

    @property
    def exact(self) -> bool:
        """Whether nothing is left over but rounding."""
        return self.left_over <= EXACT


NOTHING = Fit(0.0, 1.0)


def fit(residual: Tensor, direction: Tensor) -> Fit:
    """The best multiple of a direction, two float64 tensors of one shape; `NOTHING` where there is none."""
    scale, size = float(direction.abs().amax()) if direction.numel() else 0.0, norm(residual)
    if not (0.0 < scale < math.inf and 0.0 < size < math.inf):
        return NOTHING
    unit = direction / scale
    factor = float((residual * unit).sum() / (unit * unit).sum())
    return Fit(factor / scale, norm(residual - factor * unit) / size)


def left_over(residual: Tensor, explained: Tensor) -> float:
    """Norm of `residual - explained` in norms of the residual; inf for a residual of zero."""
    size = norm(residual)
    return norm(residual - explained) / size if size > 0 else math.inf


def norm(values: Tensor) -> float:
    """Euclidean norm, for very small and very large values too."""
    largest = float(values.abs().amax()) if values.numel() else 0.0
    if not 0.0 < largest < math.inf:
        return largest
    return largest * float((values / largest).square().sum().sqrt())


def telling(residual: Tensor) -> int:
    """How many elements of a residual are not negligible: what a fit has to hold for."""
    return int((residual.abs() > 1e-9 * residual.abs().amax()).sum()) if residual.numel() else 0


def same(first: float, second: float) -> bool:
    """Whether two factors are one number."""
    return math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-9)


def finite(values: Tensor) -> bool:
    """Whether there is neither NaN nor infinity."""
    return bool(torch.isfinite(values).all())
