"""The rule of the exact tier: is this gradient the true one? Used for gradients and forward outputs alike.

Both sides are float64, so every difference beyond rounding is a mistake. The comparison goes tile by tile, because a
norm over the whole tensor lets a wrong tail hide behind large values elsewhere, and an elementwise one rejects honest
cancellation. A tile passes when

    norm(answer - truth)  <=  1e-5 * norm(truth)  +  1e-8 * sqrt(elements of the tile) * scale

where `scale` is the size a gradient entry has under a random cotangent of the same RMS (`kernel_agent.oracle.truth`).
The second term is what remains for gradients that are zero by cancellation, such as softmax under a constant cotangent.
Every term is proportional to the cotangent: there is no absolute tolerance, and a zero cotangent leaves exactly none.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

VERSION = 2
"""Raised with a change of rule or plan after which verdicts recorded before it say too little."""
RELATIVE = 1e-5
"""Allowed error norm of a tile over its truth norm."""
SCALED = 1e-8
"""Allowed error norm of a tile over `sqrt(elements) * scale`."""
TILE = (16, 64)
"""Tile extents along the last two dimensions; leading dimensions are not grouped."""


class Agreement(str, enum.Enum):
    """How an answer relates to the truth."""

    EQUAL = "equal"
    NOT_FINITE = "not finite"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing one tensor with its truth."""

    agreement: Agreement
    ratio: float
    """Worst error of a tile over the error allowed there; at most 1 passes; inf where nothing is allowed."""
    tile: tuple[int, ...]
    """Index of the worst tile, one entry per dimension."""
    extent: tuple[int, ...]
    """Elements per tile and dimension: tile i covers elements i * extent up to (i + 1) * extent."""
    relative_error: float
    """Norm of the whole error over the norm of the whole truth."""
    factor: float
    """Least-squares factor of the answer over the truth; -1 is a wrong sign, 2 a term counted twice."""
    is_multiple: bool
    """Whether that factor explains the whole error."""
    wrong_tiles: int
    tiles: int
    strange: int
    """Elements that are NaN or infinite on one side only."""

    @property
    def passed(self) -> bool:
        """True when no tile exceeds its allowance."""
        return self.agreement is Agreement.EQUAL


def tile_extent(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements per tile along every dimension of a tensor of this shape."""
    if not shape:
        return ()
    grouped = TILE[-min(2, len(shape)) :]
    return (1,) * (len(shape) - len(grouped)) + grouped


def compare(answer: Tensor, truth: Tensor, scale: float) -> Comparison:
    """Apply the rule to two float64 tensors of equal shape; `scale` is the S term per element (not negative).

    Elements that are NaN or of the same infinity on both sides agree and count as zero.
    """
    extent = tile_extent(tuple(truth.shape))
    answer, truth = answer.to(torch.float64), truth.to(torch.float64)
    if truth.numel() == 0:
        return Comparison(Agreement.EQUAL, 0.0, (), extent, 0.0, 1.0, True, 0, 0, 0)
    same = (answer == truth) | (answer.isnan() & truth.isnan())
    strange = ~same & ~(answer.isfinite() & truth.isfinite())
    if bool(strange.any()):
        where = strange.nonzero()[0].tolist()
        tile = tuple(i // e for i, e in zip(where, extent, strict=True))
        # A truth that is not finite where the answer is, is a wrong value; the reverse is a broken one.
        broken = bool((strange & ~answer.isfinite()).any())
        kind = Agreement.NOT_FINITE if broken else Agreement.DIFFERENT
        return Comparison(
            kind, math.inf, tile, extent, math.inf, math.nan, False, 0, count_tiles(truth, extent), int(strange.sum())
        )
    clean = torch.where(truth.isfinite(), truth, 0.0)
    error = torch.where(truth.isfinite(), answer - truth, 0.0)
    errors, norms = (tile_norms(t, extent) for t in (error, clean))
    sizes = _tile_sizes(tuple(clean.shape), clean.device)
    allowed = RELATIVE * norms + SCALED * scale * sizes
    ratios = torch.where(errors == 0, 0.0, errors / allowed)  # x / 0 is inf: nothing is allowed there
    worst = int(ratios.argmax())
    ratio = float(ratios.flatten()[worst])
    total, energy = float(clean.norm()), float((clean * clean).sum())
    factor = float(((clean + error) * clean).sum()) / energy if energy else math.nan
    left_over = float((clean + error - factor * clean).norm()) if energy else math.inf
    return Comparison(
        Agreement.EQUAL if ratio <= 1.0 else Agreement.DIFFERENT,
        ratio,
        tuple(int(i) for i in np.unravel_index(worst, ratios.shape)),  # torch's loads sympy
        extent,
        float(error.norm()) / total if total else (0.0 if not bool(error.any()) else math.inf),
        factor,
        left_over <= 1e-6 * total,
        int((ratios > 1.0).sum()),
        ratios.numel(),
        0,
    )


def breaks(answer: Tensor, truth: Tensor) -> bool:
    """Whether an answer is NaN or infinite where the truth is finite: all that is asked of it at extreme values."""
    return bool((truth.isfinite() & ~answer.isfinite()).any())


def count_tiles(t: Tensor, extent: tuple[int, ...]) -> int:
    """How many tiles a tensor has."""
    return math.prod(-(-n // e) for n, e in zip(t.shape, extent, strict=True))


@functools.lru_cache(64)
def _tile_sizes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The root of every tile's number of elements."""
    return tile_norms(torch.ones(shape, dtype=torch.float64, device=device), tile_extent(shape))


def tile_norms(t: Tensor, extent: tuple[int, ...]) -> Tensor:
    """Euclidean norm of every tile; the tail tiles are padded with zeros."""
    grouped = [d for d, e in enumerate(extent) if e > 1]
    padding: list[int] = []
    for d in reversed(grouped):
        padding += [0, -t.shape[d] % extent[d]]
    if grouped:
        t = torch.nn.functional.pad(t, padding)
    for d in reversed(grouped):
        t = t.unflatten(d, (-1, extent[d]))
    # Unflattened from the back, grouped dimension d stands at d + (grouped ones before it), its inside right after.
    inside = [d + before + 1 for before, d in enumerate(grouped)]
    if not inside:
        return t.abs()
    largest = t.abs().amax()  # squares of very small or large values would vanish or overflow
    return largest * (t / largest).square().sum(dim=inside).sqrt() if bool(largest > 0) else t.sum(dim=inside)
