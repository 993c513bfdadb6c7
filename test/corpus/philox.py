"""Philox 4x32-10 in NumPy, written from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox(seed: int, counter: Tensor) -> list[Tensor]:
    """Four words (int64 holding uint32) per counter; counters are the lowest of four words, as in `tl.randint4x`."""
    c = [counter.numpy().astype(np.uint64) & _LOW, *(np.zeros(counter.shape, np.uint64) for _ in range(3))]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(_ROUNDS):
        a = c[0] * np.uint64(_MULTIPLIERS[0])
        b = c[2] * np.uint64(_MULTIPLIERS[1])
        shift = np.uint64(32)
        c = [
            (b >> shift) ^ c[1] ^ np.uint64(keys[0]),
            b & _LOW,
            (a >> shift) ^ c[3] ^ np.uint64(keys[1]),
            a & _LOW,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]
    return [torch.from_numpy(word.astype(np.int64)) for word in c]


def uniform(word: Tensor) -> Tensor:
    """[0, 1) from a word: its sign bit folded away, divided by 2**31 as Triton's f32 constant does."""
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    folded = torch.where(signed < 0, -signed - 1, signed)
    return folded.double() * 4.6566127342e-10


def normal_pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two standard normals from two words by Box and Muller."""
    radius = (-2.0 * uniform(first).clamp(min=1.0e-7).log()).sqrt()
    angle = 6.283185307179586 * uniform(second)
    return radius * angle.cos(), radius * angle.sin()
