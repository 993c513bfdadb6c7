"""What honest rounding makes of gradients on the device: the measure that real kernels are held against.

All computations are of the user's own forward and none of the candidate: its kernels executed and differentiated in
narrow arithmetic (operands of products cut to the coarsest product of the forward's kernels, all other results to
float32, `exp` taken as `exp2` of a rounded product, as Triton compiles it), and torch's autograd of `reference` in the
dtypes of the call with products cut alike. Where the coarsest product is of tf32, the former is computed in operands
whose further bits are dropped, too, as tensor cores drop them: all shrink, which shows where a gradient is a difference
of sums of products and of something else. Of all, the largest error counts, tile by tile.

Float32 gradients are computed several times more in stochastic arithmetic (`kernel_agent.bench.narrow`). One
computation says little of a tile whose gradient is the difference of two large numbers, `dy - sum(dy * y)` where one
`y` is almost the whole sum: it is right by luck in some such tiles, and another honest one is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_agent.gate.rule import tile_extent
from kernel_agent.ir.rounding import rounded

USUAL = 0.95
"""Share of tiles whose relative error counts as usual."""
UNEVEN = 8.0
"""Usual relative error of tiles over that of the whole at most: tiles that are zero by cancellation say nothing."""
DRAWS = 3
"""Further computations of float32 gradients, in stochastic arithmetic; a refused one gets more."""


@dataclass(frozen=True)
class HonestError:
    """By how much an honest computation of one gradient misses the truth."""

    tiles: Tensor
    """Root mean square of the error in every tile."""
    relative: float
    """Norm of the whole error over the norm of the truth."""
    largest: float
    """Largest absolute error."""
    usual: float = 0.0
    """Relative error that `USUAL` of the tiles stay within, at most `UNEVEN` times `relative`."""
    jumps: Tensor | None = None
    """By how much each element jumped where coarse products decide which side of a kink is taken, on the CPU; zero
    where none did. No other number here counts these elements."""

    def joined(self, other: HonestError) -> HonestError:
        """The larger of two errors, tile by tile."""
        return HonestError(
            torch.maximum(self.tiles, other.tiles),
            max(self.relative, other.relative),
            max(self.largest, other.largest),
            max(self.usual, other.usual),
            _larger(self.jumps, other.jumps),
        )

    @property
    def form(self) -> dict[str, float]:
        """What travels in a record."""
        return {"relative": self.relative, "largest": self.largest, "usual": self.usual}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What travels beside a record, of the gradient of this name."""
        jumps = {} if self.jumps is None else {f"honest.{name}.jumps": self.jumps}
        return {f"honest.{name}": self.tiles, **jumps}

    @staticmethod
    def sent(name: str, form: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HonestError:
        """What arrived of it."""
        return HonestError(
            tensors[f"honest.{name}"],
            form["relative"],
            form["largest"],
            form["usual"],
            tensors.get(f"honest.{name}.jumps"),
        )


def honest_error(computed: Tensor, truth: Tensor, dtype: torch.dtype) -> HonestError:
    """The error of a gradient that is stored in `dtype`, against its float64 truth."""
    stored = rounded(computed.detach().to(torch.float64), dtype) if dtype != torch.float64 else computed.detach()
    both = stored.isfinite() & truth.isfinite()
    error = torch.where(both, stored - truth, 0.0)
    norm = float(torch.where(both, truth, 0.0).norm())
    relative = float(error.norm()) / norm if norm else 0.0
    tiles = tile_rms(error)
    return HonestError(
        tiles.cpu(),
        relative,
        float(error.abs().max()) if error.numel() else 0.0,
        min(_usual(tiles, tile_rms(torch.where(both, truth, 0.0))), UNEVEN * relative),
    )


def _larger(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return torch.maximum(one, other)


def _usual(errors: Tensor, sizes: Tensor) -> float:
    """The relative error that `USUAL` of the tiles that are not zero stay within."""
    ratios = (errors / sizes)[sizes > 0].flatten()
    if not len(ratios):
        return 0.0
    return float(ratios.kthvalue(max(1, math.ceil(USUAL * len(ratios)))).values)


def tile_rms(t: Tensor, grouped: tuple[int, ...] | None = None) -> Tensor:
    """Root mean square of every tile of a float64 tensor; padding does not count.

    `grouped` are the elements per tile in the last dimensions; None: as `tile_extent` says.

    Squares of numbers that any narrower format holds stay within float64: nothing is scaled here, unlike in `rule`.
    """
    extent = tile_extent(tuple(t.shape)) if grouped is None else (1,) * (t.ndim - len(grouped)) + grouped
    total, counts = t * t, torch.ones((1,) * t.ndim, dtype=torch.float64, device=t.device)
    for dim, size in enumerate(extent):
        if size == 1:
            continue
        length = t.shape[dim]
        whole = length - length % size
        parts = [total.narrow(dim, 0, whole).unflatten(dim, (-1, size)).sum(dim + 1)]
        parts += [total.narrow(dim, whole, length - whole).sum(dim, keepdim=True)] if whole < length else []
        total = torch.cat(parts, dim)
        filled = torch.full((total.shape[dim],), float(size), dtype=torch.float64, device=t.device)
        if whole < length:
            filled[-1] = length - whole
        counts = counts * filled.view([-1 if d == dim else 1 for d in range(t.ndim)])
    return (total / counts).sqrt()
