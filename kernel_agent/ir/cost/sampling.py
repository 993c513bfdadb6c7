"""Which programs stand for all of a large launch, and what they say of the memory that all together touch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SEED = 20
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, are spread evenly however many are taken."""


@dataclass(frozen=True, eq=False)
class Stratum:
    """Programs of one part of the grid, and how many programs each of them stands for."""

    programs: Tensor
    """Linear ids, shape (n,), ascending."""
    weight: float


def strata(grid: tuple[int, int, int], count: int) -> list[Stratum]:
    """About `count` programs: the last ones along each axis, which have the tails, apart from the others.

    Each part is cut into equal runs of consecutive programs and one is taken from each run, at places that are spread
    evenly over the runs, so that work which grows along the grid, as under a causal mask, is represented fairly.
    """
    parts = list(itertools.product(*[[(0, size - 1), (size - 1, size)] for size in grid]))
    sizes = [math.prod(stop - start for start, stop in part) for part in parts]
    found = []
    for part, size in zip(parts, sizes, strict=True):
        if size == 0:
            continue
        wanted = min(size, max(8, round(count * size / math.prod(grid))))
        edges = torch.linspace(0, size, wanted + 1, dtype=torch.float64)
        inside = (0.5 + _GOLDEN * torch.arange(wanted, dtype=torch.float64)) % 1
        place = (edges[:-1] + inside * (edges[1:] - edges[:-1])).long().clamp(max=size - 1).unique()
        found.append(Stratum(_linear(place, part, grid), size / place.numel()))
    return found


def _linear(place: Tensor, part: tuple[tuple[int, int], ...], grid: tuple[int, int, int]) -> Tensor:
    """Linear ids of the programs at positions in a box of the grid, ascending."""
    ids, scale = torch.zeros_like(place), 1
    for (start, stop), size in zip(part, grid, strict=True):
        ids = ids + (start + place % (stop - start)) * scale
        place = place.div(stop - start, rounding_mode="floor")
        scale *= size
    return ids.sort().values


def halves(programs: int, count: int) -> tuple[Tensor, Tensor]:
    """Two disjoint random samples of `count` programs together, ids ascending."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    drawn = torch.randperm(programs, generator=generator)[:count]
    return drawn[: count // 2].sort().values, drawn[count // 2 :].sort().values


def different(seen: int, share: float, touches: float, size: int) -> float:
    """How many different elements all programs touch, when a random `share` of them touched `seen`.

    `touches` is the sum over all programs of the different elements each of them touches. Assumes that every element
    is touched by equally many programs m = touches / U: then a sample sees U (1 - (1 - share)**m) of the U elements.
    """
    if not seen:
        return 0.0
    low, high = float(seen), max(float(seen), min(float(size), touches))
    for _ in range(60):
        middle = (low + high) / 2
        if middle * (1 - (1 - share) ** (touches / middle)) < seen:
            low = middle
        else:
            high = middle
    return high
