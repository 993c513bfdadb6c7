"""The rule of the native tier: a real kernel may miss the truth by twice what an honest computation misses it by.

For every tile of a gradient

    rms(error) <= 2 * max(honest error of the tile, honest relative error of the whole * rms(truth))
                  + half an ulp + S term

and for the largest element alike. Half an ulp is that of the storage dtype at the tile's root mean square (at the
largest element for the largest error); the S term is 2**(1 - bits) * S, with S the size of the gradient under random
cotangents and bits those of the coarsest arithmetic that is honest. No number is absolute: scale the cotangent, and
everything scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.bench.honest import HonestError, tile_rms
from kernel_agent.gate.rule import tile_extent

HONEST = 2.0
"""How much worse than honest a candidate may be."""
_PEAK = 4.0
"""Largest over typical element of what the S term stands for."""


@dataclass(frozen=True)
class NativeComparison:
    """How one gradient of a real kernel compares with the truth."""

    passed: bool
    ratio: float
    """Worst error over the allowed one; at most 1 passes."""
    tile: tuple[int, ...]
    """Index of the worst tile."""
    extent: tuple[int, ...]
    """Elements per tile and dimension."""
    relative_error: float
    """Norm of the error over the norm of the truth."""
    honest_error: float
    """The same of the honest computation."""
    strange: int
    """Elements that are NaN or infinite where the truth, stored in this dtype, is finite."""


def compare_native(
    given: Tensor, truth: Tensor, honest: HonestError, scale: float, dtype: torch.dtype, bits: int
) -> NativeComparison:
    """Apply the rule to a gradient in its own dtype and a float64 truth of the same shape.

    `scale` is S per element; `bits` are those of the coarsest honest arithmetic.
    """
    extent = tile_extent(tuple(truth.shape))
    if truth.numel() == 0:
        return NativeComparison(True, 0.0, (), extent, 0.0, honest.relative, 0)
    wide = given.to(torch.float64)
    storable = truth.isfinite() & (truth.abs() <= torch.finfo(dtype).max)
    strange = storable & ~wide.isfinite()
    if bool(strange.any()):
        where = strange.nonzero()[0].tolist()
        tile = tuple(i // e for i, e in zip(where, extent, strict=True))
        return NativeComparison(False, math.inf, tile, extent, math.inf, honest.relative, int(strange.sum()))
    kept = storable & wide.isfinite()
    clean, error = torch.where(kept, truth, 0.0), torch.where(kept, wide - truth, 0.0)
    size, missed = tile_rms(clean), tile_rms(error)
    small = 2.0 ** (1 - bits) * scale
    allowed = HONEST * torch.maximum(honest.tiles, honest.relative * size) + half_ulp(size, dtype) + small
    ratios = torch.where(missed == 0, 0.0, missed / allowed)
    worst = int(ratios.argmax())
    peak = float(error.abs().max())
    most = HONEST * honest.largest + float(half_ulp(clean.abs().max(), dtype)) + _PEAK * small
    by_peak = peak / most if peak else 0.0
    ratio = max(float(ratios.flatten()[worst]), by_peak)
    tile = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratios.shape))
    if by_peak > float(ratios.flatten()[worst]):
        place = torch.unravel_index(error.abs().argmax(), error.shape)
        tile = tuple(int(i) // e for i, e in zip(place, extent, strict=True))
    norm = float(clean.norm())
    return NativeComparison(
        ratio <= 1.0,
        ratio,
        tile,
        extent,
        float(error.norm()) / norm if norm else (0.0 if peak == 0 else math.inf),
        honest.relative,
        0,
    )


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbours of `dtype` at these magnitudes; that of subnormal numbers below them."""
    kind = torch.finfo(dtype)
    size = values.clamp(min=kind.smallest_normal)
    return 0.5 * kind.eps * torch.exp2(torch.floor(torch.log2(size)))
