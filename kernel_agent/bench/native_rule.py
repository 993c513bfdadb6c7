"""The rule of the native tier: a real kernel may miss the truth by twice what an honest computation misses it by.

For every tile of a gradient

    rms(error) <= 2 * max(honest error of the tile, usual honest relative error * rms(truth)) + grain + S term

and for the largest element alike. The usual relative error is what nineteen in twenty tiles of the honest computation
stay within: where a whole row shares one rounded statistic, a tile of it may be lucky in one computation and not in
another. The grain is half an ulp of the storage dtype at the tile's root mean square (at the
largest element for the largest error), and two ulps of it in float32, where a GPU approximates exp, log, sin, division
and roots: PTX promises 2**-22 for ex2.approx and 2 ulp for div.full, which the honest computation, on a CPU, does not
show. A downgrade is far above: tf32 cuts at 2**-11. The S term is 2**(1 - bits) * S, with S the size of the gradient
under random cotangents and bits those of the coarsest arithmetic that is honest. No number is absolute: scale the
cotangent, and everything scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.bench.honest import HonestError, tile_rms
from kernel_agent.bench.narrow import FLOAT32_BITS
from kernel_agent.gate.rule import TILE, tile_extent

HONEST = 2.0
"""How much worse than honest a candidate may be."""
APPROXIMATED = 4.0
"""Half ulps that approximated functions of float32 may be off by: PTX ISA, ex2.approx.ftz.f32 and div.full.f32."""
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
    largest_allowed: float = 0.0
    """What the element with the largest error may be off by."""


def honest_bits(dtypes: Iterable[torch.dtype], dot_bits: int | None) -> int:
    """Significant bits of the coarsest arithmetic that an honest backward may use: that of the gradients of a call,
    whose other tensors are stored like them, and of the coarsest product of the forward (`dot_bits`)."""
    stored = [1 - int(math.log2(torch.finfo(dtype).eps)) for dtype in dtypes]
    return min([FLOAT32_BITS, *stored, *([dot_bits] if dot_bits else [])])


def compare_native(
    given: Tensor, truth: Tensor, honest: HonestError, scale: float, dtype: torch.dtype, bits: int
) -> NativeComparison:
    """Apply the rule to a gradient in its own dtype and a float64 truth of the same shape.

    `scale` is S per element; `bits` are those of the coarsest honest arithmetic.
    """
    extent = tile_extent(tuple(truth.shape))
    if truth.numel() == 0:
        return NativeComparison(True, 0.0, (), extent, 0.0, honest.relative, 0)
    small = 2.0 ** (1 - bits) * scale
    if honest.jumps is not None:
        given = _on_either_side(given, truth, honest.jumps)
    seen = _Sums()
    answers, exact, honests = _matrices(given), _matrices(truth), _matrices(honest.tiles)
    usual = max(honest.relative, honest.usual)
    for slab in _slabs(tuple(exact.shape)):
        seen.add(_in_slab(answers, exact, honests, slab, usual, small, dtype))
    peak_allowed = HONEST * honest.largest + float(grain(torch.tensor(seen.size), dtype)) + _PEAK * small
    by_peak = seen.peak / peak_allowed if seen.peak else 0.0
    ratio, place = (by_peak, seen.peak_tile) if by_peak > seen.ratio else (seen.ratio, seen.tile)
    if seen.strange:
        ratio, place = math.inf, seen.strange_tile
    norm, missed = math.sqrt(seen.energy), math.sqrt(seen.missed)
    relative = missed / norm if norm else (0.0 if seen.peak == 0 else math.inf)
    return NativeComparison(
        ratio <= 1.0,
        ratio,
        _tile_of(place, tuple(truth.shape)),
        extent,
        math.inf if seen.strange else relative,
        honest.relative,
        seen.strange,
        peak_allowed,
    )


def _on_either_side(given: Tensor, truth: Tensor, jumps: Tensor) -> Tensor:
    """A gradient with what an honest computation, too, takes from the other side of a kink taken to be right."""
    jumps = jumps.to(given.device)
    error = (given.to(torch.float64) - truth.to(given.device)).abs()
    return torch.where((jumps > 0) & (error <= HONEST * jumps), truth.to(given.device), given.to(torch.float64))


_SLAB = 1 << 20
"""Elements that are compared at once: what comes up between stays in the processor's cache."""
_Place = tuple[int, int, int]


@dataclass
class _Sums:
    """What several slabs come to."""

    ratio: float = 0.0
    tile: _Place = (0, 0, 0)
    peak: float = 0.0
    """Largest absolute error."""
    peak_tile: _Place = (0, 0, 0)
    size: float = 0.0
    """Largest absolute truth."""
    energy: float = 0.0
    missed: float = 0.0
    strange: int = 0
    strange_tile: _Place = (0, 0, 0)

    def add(self, other: _Sums) -> None:
        """Take in one more slab."""
        if other.ratio > self.ratio:
            self.ratio, self.tile = other.ratio, other.tile
        if other.peak > self.peak:
            self.peak, self.peak_tile = other.peak, other.peak_tile
        if other.strange and not self.strange:
            self.strange_tile = other.strange_tile
        self.size = max(self.size, other.size)
        self.energy += other.energy
        self.missed += other.missed
        self.strange += other.strange


@dataclass(frozen=True)
class _Slab:
    """Some rows of some matrices."""

    matrices: slice
    rows: slice


def _matrices(t: Tensor) -> Tensor:
    """A tensor as a stack of matrices: tiles lie in the last two dimensions alone."""
    return t.reshape(-1, *((1,) * (2 - t.ndim) + tuple(t.shape))[-2:])


def _slabs(shape: tuple[int, ...]) -> Iterator[_Slab]:
    count, rows, columns = shape
    height = min(rows, max(1, _SLAB // columns // TILE[0]) * TILE[0])
    depth = max(1, _SLAB // (rows * columns)) if height == rows else 1
    for matrix in range(0, count, depth):
        for row in range(0, rows, height):
            yield _Slab(slice(matrix, matrix + depth), slice(row, row + height))


def _in_slab(
    answers: Tensor,
    exact: Tensor,
    honests: Tensor,
    slab: _Slab,
    relative: float,
    small: float,
    dtype: torch.dtype,
) -> _Sums:
    """The rule in one slab."""
    truth = exact[slab.matrices, slab.rows]
    answer = answers[slab.matrices, slab.rows].to(torch.float64)
    tiles = slice(slab.rows.start // TILE[0], -(-slab.rows.stop // TILE[0]))
    origin = (slab.matrices.start, tiles.start, 0)
    clean, error, strange = truth, answer - truth, None
    if not (math.isfinite(float(error.sum())) and _largest(truth) <= torch.finfo(dtype).max):
        storable = truth.abs() <= torch.finfo(dtype).max  # not NaN, too
        strange = storable & ~answer.isfinite()
        kept = storable & answer.isfinite()
        clean, error = torch.where(kept, truth, 0.0), torch.where(kept, error, 0.0)
    size, missed = tile_rms(clean, TILE), tile_rms(error, TILE)
    honest = honests[slab.matrices, tiles].to(size.device)
    allowed = HONEST * torch.maximum(honest, relative * size) + grain(size, dtype) + small
    ratios = torch.where(missed == 0, 0.0, missed / allowed)
    found = _Sums(
        ratio=float(ratios.max()),
        tile=_moved(_position(ratios), origin),
        peak=_largest(error),
        size=_largest(clean),
        energy=float(clean.norm()) ** 2,
        missed=float(error.norm()) ** 2,
    )
    found.peak_tile = _moved(_tile(_position(error.abs())), origin) if found.peak else (0, 0, 0)
    if strange is not None and bool(strange.any()):
        found.strange = int(strange.sum())
        found.strange_tile = _moved(_tile(_position(strange.to(torch.uint8))), origin)
    return found


def _largest(t: Tensor) -> float:
    low, high = torch.aminmax(t)
    return max(-float(low), float(high))


def _position(t: Tensor) -> _Place:
    """Where the first of the largest elements stands."""
    matrix, row, column = torch.unravel_index(t.argmax(), t.shape)
    return int(matrix), int(row), int(column)


def _tile(place: _Place) -> _Place:
    return place[0], place[1] // TILE[0], place[2] // TILE[1]


def _moved(place: _Place, origin: _Place) -> _Place:
    return place[0] + origin[0], place[1] + origin[1], place[2] + origin[2]


def _tile_of(place: _Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tile of the stack of matrices as a tile of the tensor."""
    if len(shape) < 2:
        return place[3 - len(shape) :]
    leading = torch.unravel_index(torch.tensor(place[0]), shape[:-2]) if len(shape) > 2 else ()
    return (*(int(i) for i in leading), place[1], place[2])


def grain(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What one rounding, and in float32 one approximated function of a GPU, may miss values of these magnitudes by."""
    return APPROXIMATED * half_ulp(values, dtype) if dtype is torch.float32 else half_ulp(values, dtype)


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbours of `dtype` at these magnitudes; that of subnormal numbers below them."""
    kind = torch.finfo(dtype)
    size = values.clamp(min=kind.smallest_normal)
    return 0.5 * kind.eps * torch.exp2(torch.floor(torch.log2(size)))
