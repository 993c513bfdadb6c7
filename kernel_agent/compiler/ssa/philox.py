"""Random numbers of `triton.language.random`: the Philox generator with ten rounds (Salmon et al., SC 2011)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_agent.ir.operations.integers import multiply_high

_ROUNDS = 10
_FACTORS = (0xCD9E8D57, 0xD2511F53)
_RAISES = (0x9E3779B9, 0xBB67AE85)
_SCALE = 4.6566127342e-10
"""As Triton writes it: a bit less than 2**-31, so that the largest number stays below one."""
_LEAST = 1.0e-7
"""What Box and Muller's logarithm is taken of at least, in Triton."""


def randint(seed: Tensor, offset: Tensor) -> Tensor:
    """`tl.randint`: int32, of the broadcast shape."""
    return _states(seed, offset)[0]


def rand(seed: Tensor, offset: Tensor) -> Tensor:
    """`tl.rand`: float64 in [0, 1)."""
    return _uniform(randint(seed, offset))


def randn(seed: Tensor, offset: Tensor) -> Tensor:
    """`tl.randn`: float64, normal by Box and Muller's way."""
    first, second, *_ = _states(seed, offset)
    radius = torch.sqrt(-2.0 * torch.log(_uniform(first).clamp(min=_LEAST)))
    return radius * torch.cos(2.0 * math.pi * _uniform(second))


def _states(seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four int32 that one counter gives."""
    wide_seed, wide_offset = torch.broadcast_tensors(seed.to(torch.int64), offset.to(torch.int64))
    k0, k1 = _low(wide_seed), _low(wide_seed >> 32)
    c0, c1 = _low(wide_offset), _low(wide_offset >> 32) if offset.dtype is torch.int64 else _low(wide_offset) * 0
    c2, c3 = c0 * 0, c0 * 0
    a, b = (_low(torch.full_like(wide_seed, factor)) for factor in _FACTORS)
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = multiply_high(a, c2) ^ c1 ^ k0, a * c2, multiply_high(b, c0) ^ c3 ^ k1, b * c0
        k0, k1 = (k + _low(torch.full_like(wide_seed, step)) for k, step in zip((k0, k1), _RAISES, strict=True))
    return c0, c1, c2, c3


def _low(value: Tensor) -> Tensor:
    return value.to(torch.int32)


def _uniform(bits: Tensor) -> Tensor:
    return torch.where(bits < 0, -bits - 1, bits).to(torch.float64) * _SCALE
