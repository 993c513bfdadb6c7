"""Floats that pass through integer code: packed keys, truncated halves, exchanged words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case


@triton.jit
def _argsort(X, VALUES, PLACES, N: tl.constexpr):
    # value and place travel in one word of 64 bits, ordered as integers
    c = tl.arange(0, N)
    x = tl.load(X + tl.program_id(0) * N + c)
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    key = (ordered.to(tl.uint64) << 32) | c.to(tl.uint64)
    key = tl.sort(key)
    place = (key & 0xFFFFFFFF).to(tl.int32)
    tl.store(PLACES + tl.program_id(0) * N + c, place)
    tl.store(VALUES + tl.program_id(0) * N + c, tl.gather(x, place, 0))


def argsort(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int32, device=x.device)
    _argsort[(x.shape[0],)](x, values, places, N=x.shape[1])
    return values, places


@triton.jit
def _exchange_sign(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=1.0)
    y = tl.load(Y + o, mask=o < n, other=1.0)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(X + o, (sign | size).to(tl.float32, bitcast=True), mask=o < n)


def exchange_sign(x: Tensor, y: Tensor) -> Tensor:
    _exchange_sign[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return x


@triton.jit
def _topk_places(X, W, OUT, N: tl.constexpr, K: tl.constexpr):
    c = tl.arange(0, N)
    row = tl.program_id(0)
    x = tl.load(X + row * N + c)
    left = x
    total = 0.0
    norm = 0.0
    for _ in range(K):
        best = tl.max(left, 0)
        place = tl.argmax(left, 0)
        weight = tl.exp(best)
        total += weight * tl.load(W + place)
        norm += weight
        left = tl.where(c == place, float("-inf"), left)
    tl.store(OUT + row, total / norm)


def topk_places(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _topk_places[(x.shape[0],)](x, w, out, N=x.shape[1], K=3)
    return out


def _topk_reference(x: Tensor, w: Tensor) -> Tensor:
    best, place = x.topk(3, -1)
    return (best.softmax(-1) * w[place]).sum(-1)


@triton.jit
def _highest_wins(X, OWNER, OUT, n):
    # a lock made of compare and swap on a float: the largest value stays
    pid = tl.program_id(0)
    x = tl.load(X + pid)
    done = False
    while not done:
        old = tl.atomic_add(OUT, 0.0)  # a plain load would race
        if x > old:
            seen = tl.atomic_cas(OUT, old, x)
            done = seen == old
        else:
            done = True
    tl.atomic_add(OWNER, x * x)


def highest_wins(x: Tensor) -> tuple[Tensor, Tensor]:
    out, owner = torch.full((1,), -10.0, device=x.device), torch.zeros(1, device=x.device)
    _highest_wins[(x.numel(),)](x, owner, out, x.numel())
    return out, owner


CASES = [
    Case("argsort_packed", argsort, lambda: (torch.randn(3, 16),), lambda x: tuple(x.sort(-1))),
    Case("exchange_sign", exchange_sign, lambda: (torch.randn(30), torch.randn(30)), lambda x, y: x.abs() * y.sign()),
    Case("topk_places", topk_places, lambda: (torch.randn(4, 16), torch.randn(16)), _topk_reference),
    Case("highest_wins", highest_wins, lambda: (torch.randn(9),), lambda x: (x.amax()[None], (x * x).sum()[None])),
]
