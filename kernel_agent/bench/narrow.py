"""Arithmetic as coarse as that of honest kernels, around float64 computations: to nearest, or as a draw of many.

A draw is a computation in stochastic arithmetic (Vignes 2004, "Discrete stochastic arithmetic for validating results of
numerical software"): every result goes up or down to a neighbouring float32 at random, functions that a GPU
approximates are off by what PTX allows one way or the other, and sums by what their partial sums lose. Rounding to
nearest is one computation, and may be right by luck where the next honest one is not; the spread of several draws is
what rounding does to a result, first-order propagation through the exact derivatives included.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from kernel_agent.ir.rounding import tf32_truncated

FLOAT32_BITS = 24
ULP = 2.0 ** (1 - FLOAT32_BITS)
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "dot", "mv"})
_SUMS = frozenset({"sum", "mean", "cumsum"})
_PRODUCTS_OF_FACTORS = frozenset({"prod", "cumprod"})
_SCATTERED = frozenset({"scatter_add_", "index_add_"})
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
_UNDER_HALF = 0.49999
"""Of an ulp: brings what lies between two neighbours to either, and leaves what is one of them."""
_SPREAD = 0.5
"""Ulps that a partial sum may be off by; even shares of it spread as roundings do."""
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Odd numbers of 64 bits with their sign."""
_EXPONENT = 0x7FF0000000000000
_BITS_OF = {torch.float64: 53, torch.float32: FLOAT32_BITS, torch.float16: 11, torch.bfloat16: 8}


class NarrowArithmetic(TorchDispatchMode):  # type: ignore[misc]
    """Cuts operands of products to `dot_bits` significant bits, and other float64 results to float32 if `narrow`.

    `dropped`: to those that tensor cores read of tf32, not rounded to nearest: all operands shrink, and so does a sum
    of many products, where roundings to nearest cancel. `draw`: with this seed, in stochastic arithmetic;
    what float32 holds exactly, such as the exponential of zero, is never off.
    """

    def __init__(self, dot_bits: int | None, *, narrow: bool, dropped: bool = False, draw: int | None = None) -> None:
        super().__init__()
        self._dot_bits = dot_bits
        self._dropped = dropped
        self._narrow = narrow
        self._draw = draw
        self._seed = draw or 0
        self._summed: dict[int, float] = {}
        """Terms of the latest sums by how many there are."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation in narrow arithmetic."""
        name = func._schema.name.removeprefix("aten::")
        if self._dot_bits is not None and name in _PRODUCTS:
            args = tree_map(self._operand, args)
        if self._narrow and func is torch.ops.aten.exp.default and args[0].dtype == torch.float64:
            func, args = torch.ops.aten.exp2.default, (_float32(args[0] * math.log2(math.e)),)
        if self._draw is not None and name in _SCATTERED:
            return self._scattered(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if not self._narrow or any(out.alias_info is not None for out in func._schema.returns):
            return result  # a view stays a view
        if self._draw is None:
            return tree_map(_float32, result)
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            return self._drawn(name, func, args, kwargs or {}, result)
        return tree_map(_float32, result)

    def _drawn(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], exact: Tensor) -> Tensor:
        """A float32 that this operation may give."""
        lost = self._lost(name, func, args, kwargs, exact)
        if lost is not None:
            exact = torch.where(_float32(exact) == exact, exact, exact + lost * shares(exact, 2 * self._seed))
        up_or_down = _UNDER_HALF * ULP * _power_of_two(exact) * directions(exact, 2 * self._seed + 1)
        # -0.5 ulp reaches beyond the neighbour of a power of two, and turns infinities into NaN: both are held exactly
        return _float32(torch.where(_float32(exact) == exact, exact, exact + up_or_down))

    def _lost(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], exact: Tensor
    ) -> Tensor | float | None:
        """What an operation may be off by before its result is rounded; None: by nothing."""
        if func in _ALLOWED:
            return exact * (_ALLOWED[func] * ULP)
        if name in _SUMS and args[0].dtype == torch.float64 and exact.numel():
            terms = args[0].size(args[1]) if name == "cumsum" else args[0].numel() / exact.numel()
            self._summed[exact.numel()] = terms
            levels = math.log2(max(1.0, terms)) / (terms if name == "mean" else 1.0)
            return func(args[0].square(), *args[1:], **kwargs).sqrt() * (_SPREAD * ULP * math.sqrt(levels))
        if name in _PRODUCTS_OF_FACTORS and args[0].dtype == torch.float64 and exact.numel():
            return exact * (_SPREAD * ULP * _roundings(name, args, exact).sqrt())
        if name in ("mm", "bmm") and (self._dot_bits or FLOAT32_BITS) >= FLOAT32_BITS:
            # A chain of one fused multiply-add per term.
            chain = math.sqrt(args[0].size(-1) / 2)
            return func(args[0].square(), args[1].square()).sqrt() * (_SPREAD * ULP * chain)
        return None

    def _scattered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Additions to elements of memory, one after another wherever several meet.

        They go on with the sum that a tile made just before: a kernel may make them in any order, and one term after
        another loses most.
        """
        into, dim, index, terms = args[:4]
        within = self._summed.pop(terms.numel(), 1.0)
        if into.dtype != torch.float64 or terms.numel() == 0:
            return func(*args, **kwargs)
        counts, squares = (
            func(torch.zeros_like(into), dim, index, t) for t in (torch.ones_like(terms), terms.square())
        )
        lost = ((counts * within - 1).clamp(min=0.0) * (squares / 2)).sqrt() * (_SPREAD * ULP)
        result = func(*args, **kwargs)
        return result.add_(lost * shares(result, 2 * self._seed))

    def _operand(self, value: Any) -> Any:
        if self._dot_bits is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if self._dropped:
            return tf32_truncated(value).to(value.dtype)
        if self._draw is None or not self._narrow:
            return cut(value, self._dot_bits)
        return cut(value, self._dot_bits, 0.5 * shares(value.to(torch.float64), 2 * self._seed))


class Approximated(TorchDispatchMode):  # type: ignore[misc]
    """Functions of float64 that a GPU approximates are off by up to what PTX allows, as a seed says; nothing rounds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        result = func(*args, **(kwargs or {}))
        if func not in _ALLOWED or result.dtype != torch.float64:
            return result
        off = result * (1.0 + shares(result, self._seed) * (_ALLOWED[func] * ULP))
        return torch.where(_float32(result) == result, result, off)


def _roundings(name: str, args: tuple[Any, ...], exact: Tensor) -> Tensor:
    """How often a product rounds: once for each factor but the first, in whatever order they are taken."""
    if name == "prod":
        return torch.tensor(args[0].numel() / exact.numel() - 1, dtype=exact.dtype, device=exact.device)
    place = torch.arange(exact.size(args[1]), dtype=exact.dtype, device=exact.device)
    return place.view(-1, *((1,) * (exact.dim() - 1 - args[1] % exact.dim())))


def shares(values: Tensor, seed: int) -> Tensor:
    """Numbers between -1 and 1 for every float64 value, by its bits and a seed alone."""
    return _mixed(values, seed).to(torch.float64) * 2.0**-63


def directions(values: Tensor, seed: int) -> Tensor:
    """1.0 or -1.0 for every float64 value, by its bits and a seed alone: equal values alike, on any device."""
    return 1.0 - 2.0 * (_mixed(values, seed) < 0).to(torch.float64)


def _mixed(values: Tensor, seed: int) -> Tensor:
    """Whole numbers of 64 bits by the bits of float64 values: no generator is asked, since the executor has its own of
    them. The mixing is that of SplitMix64 (Steele, Lea and Flood, 2014)."""
    start = ((seed + 1) * _GOLDEN + 2**63) % 2**64 - 2**63
    bits = values.contiguous().view(torch.int64) + start
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        bits = (bits ^ (bits >> shift & (1 << 64 - shift) - 1)) * factor
    return bits


def _power_of_two(values: Tensor) -> Tensor:
    """The power of two at or below the magnitude of float64 values."""
    return (values.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)


def _float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        return value.to(torch.float32).to(torch.float64)
    return value


def cut(values: Tensor, bits: int, off: Tensor | float = 0.0) -> Tensor:
    """Values with at most `bits` significant bits, to nearest, of the same dtype and any exponent.

    `off`: what is added before, in units of the last bit kept; even shares between -0.5 and 0.5 make the rounding
    stochastic, and leave what needs no more bits.
    """
    if bits >= _BITS_OF.get(values.dtype, 0):
        return values
    mantissa, exponent = torch.frexp(values.to(torch.float64))
    scale = 2.0**bits
    narrow = torch.ldexp((mantissa * scale + off).round() / scale, exponent)
    return torch.where(values.isfinite(), narrow, values.to(torch.float64)).to(values.dtype)
