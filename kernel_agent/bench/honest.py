"""What honest rounding makes of gradients on the device: the measure that real kernels are held against.

All computations are of the user's own forward and none of the candidate: its kernels executed and differentiated in
narrow arithmetic (operands of products cut to the coarsest product of the forward's kernels, all other results to
float32, `exp` taken as `exp2` of a rounded product, as Triton compiles it), and torch's autograd of `reference` in the
dtypes of the call with products cut alike. Of all, the largest error counts, tile by tile.

Float32 gradients are computed in narrow arithmetic several times more, with exponentials, logarithms, quotients and
roots that are off by what PTX allows a GPU's to be off by, drawn anew each time. One computation says little of a tile
whose gradient is the difference of two large numbers, `dy - sum(dy * y)` where one `y` is almost the whole sum: it is
right by luck in some such tiles, and another honest one is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from kernel_agent.gate.rule import tile_extent
from kernel_agent.ir.rounding import rounded

FLOAT32_BITS = 24
USUAL = 0.95
"""Share of tiles whose relative error counts as usual."""
UNEVEN = 8.0
"""Usual relative error of tiles over that of the whole at most: tiles that are zero by cancellation say nothing."""
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "dot", "mv"})
DRAWS = 3
"""Further computations of float32 gradients, with functions that are off at random."""
ULP = 2.0 ** (1 - FLOAT32_BITS)
_ALLOWED = {
    torch.ops.aten.exp2.default: 2.0,
    torch.ops.aten.log.default: 2.0,
    torch.ops.aten.log2.default: 2.0,
    torch.ops.aten.div.Tensor: 2.0,
    torch.ops.aten.reciprocal.default: 1.0,
    torch.ops.aten.sqrt.default: 1.0,
    torch.ops.aten.rsqrt.default: 1.0,
}
"""Relative errors in ULP: PTX ISA, ex2.approx, lg2.approx, div.full, rcp.approx, sqrt.approx, rsqrt.approx."""
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Odd numbers of 64 bits with their sign."""
_BITS_OF = {torch.float64: 53, torch.float32: FLOAT32_BITS, torch.float16: 11, torch.bfloat16: 8}


class NarrowArithmetic(TorchDispatchMode):  # type: ignore[misc]
    """Cuts operands of products to `dot_bits` significant bits, and other float64 results to float32 if `narrow`.

    `draw`: with this seed, results of functions that a GPU approximates are off by as much as it may be; what float32
    holds exactly, such as the exponential of zero, is not.
    """

    def __init__(self, dot_bits: int | None, *, narrow: bool, draw: int | None = None) -> None:
        super().__init__()
        self._dot_bits = dot_bits
        self._narrow = narrow
        self._draw = draw

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation in narrow arithmetic."""
        if self._dot_bits is not None and func._schema.name.removeprefix("aten::") in _PRODUCTS:
            args = tree_map(self._operand, args)
        if self._narrow and func is torch.ops.aten.exp.default and args[0].dtype == torch.float64:
            func, args = torch.ops.aten.exp2.default, (_float32(args[0] * math.log2(math.e)),)
        result = func(*args, **(kwargs or {}))
        if not self._narrow or any(out.alias_info is not None for out in func._schema.returns):
            return result  # a view stays a view
        if self._draw is not None and func in _ALLOWED and result.dtype == torch.float64:
            result = self._off(result, _ALLOWED[func])
        return tree_map(_float32, result)

    def _off(self, exact: Tensor, ulps: float) -> Tensor:
        """Values up to so many ulps beside the exact ones; equal ones alike, as a function of the hardware has it."""
        errors = _scattered(exact, self._draw or 0).mul_(ulps * ULP).add_(1.0).mul_(exact)
        return torch.where(exact.to(torch.float32) == exact, exact, errors)

    def _operand(self, value: Any) -> Any:
        if self._dot_bits is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return cut(value, self._dot_bits)


def _scattered(values: Tensor, seed: int) -> Tensor:
    """Numbers in [-1, 1] that depend on the bits of float64 values and on a seed alone, on any device: no generator is
    asked, since the executor has its own of them. The mixing is that of SplitMix64 (Steele, Lea and Flood, 2014)."""
    start = ((seed + 1) * _GOLDEN + 2**63) % 2**64 - 2**63
    bits = values.contiguous().view(torch.int64) + start
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        bits = (bits ^ (bits >> shift & (1 << 64 - shift) - 1)) * factor
    return bits.to(torch.float64).mul_(2.0**-63)


def _float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        return value.to(torch.float32).to(torch.float64)
    return value


def cut(values: Tensor, bits: int) -> Tensor:
    """Values with at most `bits` significant bits, to nearest, of the same dtype and any exponent."""
    if bits >= _BITS_OF.get(values.dtype, 0):
        return values
    mantissa, exponent = torch.frexp(values.to(torch.float64))
    scale = 2.0**bits
    narrow = torch.ldexp((mantissa * scale).round() / scale, exponent)
    return torch.where(values.isfinite(), narrow, values.to(torch.float64)).to(values.dtype)


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

    def joined(self, other: HonestError) -> HonestError:
        """The larger of two errors, tile by tile."""
        return HonestError(
            torch.maximum(self.tiles, other.tiles),
            max(self.relative, other.relative),
            max(self.largest, other.largest),
            max(self.usual, other.usual),
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
