"""Sorting, selecting and rearranging elements of tiles: sort, flip, topk, join, split, interleave, cat, histogram."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64


@triton.jit
def _sort_rows(X, UP, DOWN, N: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, N)
    x = tl.load(X + row * N + c)
    tl.store(UP + row * N + c, tl.sort(x))
    tl.store(DOWN + row * N + c, tl.sort(x * x, descending=True))


def sort_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    up, down = torch.empty_like(x), torch.empty_like(x)
    _sort_rows[(x.shape[0],)](x, up, down, N=x.shape[1])
    return up, down


@triton.jit
def _sort_tile(X, Y, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(X + at)
    y = tl.sort(x, dim=1)
    # the middle of each row, weighted by its rank
    tl.store(Y + at, y * tl.arange(0, N)[None, :])


def sort_tile(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _sort_tile[(1,)](x, y, *x.shape)
    return y


@triton.jit
def _topk(X, Y, N: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(X + row * N + tl.arange(0, N))
    tl.store(Y + row * K + tl.arange(0, K), tl.topk(x, K))


def topk(x: Tensor, k: int) -> Tensor:
    y = torch.empty((x.shape[0], k), dtype=x.dtype, device=x.device)
    _topk[(x.shape[0],)](x, y, N=x.shape[1], K=k)
    return y


@triton.jit
def _flip(X, W, Y, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(X + at)
    w = tl.load(W + tl.arange(0, N))
    tl.store(Y + at, tl.flip(x, 0) + tl.flip(x, 1) * tl.flip(w, 0)[None, :])


def flip(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _flip[(1,)](x, w, y, *x.shape)
    return y


@triton.jit
def _compare_exchange(x, place, distance, up, N: tl.constexpr):
    # one step of a bitonic network, written out with tl.gather
    partner = place ^ distance
    other = tl.gather(x, partner, 0)
    keep_low = ((place & distance) == 0) == up
    return tl.where(keep_low, tl.minimum(x, other), tl.maximum(x, other))


@triton.jit
def _bitonic(X, Y, N: tl.constexpr, LOG: tl.constexpr):
    place = tl.arange(0, N)
    x = tl.load(X + tl.program_id(0) * N + place)
    for stage in tl.static_range(1, LOG + 1):
        up = (place & (1 << stage)) == 0
        for step in tl.static_range(stage - 1, -1, -1):
            x = _compare_exchange(x, place, 1 << step, up, N)
    tl.store(Y + tl.program_id(0) * N + place, x)


def bitonic(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _bitonic[(x.shape[0],)](x, y, N=x.shape[1], LOG=x.shape[1].bit_length() - 1)
    return y


@triton.jit
def _rope_interleaved(X, COS, SIN, Y, heads, D: tl.constexpr):
    position, head = tl.program_id(0), tl.program_id(1)
    at = (position * heads + head) * D
    x = tl.load(X + at + tl.arange(0, D))
    even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
    half = tl.arange(0, D // 2)
    cos = tl.load(COS + position * (D // 2) + half)
    sin = tl.load(SIN + position * (D // 2) + half)
    y = tl.interleave(even * cos - odd * sin, even * sin + odd * cos)
    tl.store(Y + at + tl.arange(0, D), y)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _rope_interleaved[x.shape[:2]](x, cos, sin, y, x.shape[1], D=x.shape[2])
    return y


def _rope_interleaved_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


@triton.jit
def _rope_half(Q, K, COS, SIN, POSITIONS, q_heads, k_heads, D: tl.constexpr, BH: tl.constexpr):
    # in place, for the heads of q and of k, at positions that the caller gives
    token = tl.program_id(0)
    position = tl.load(POSITIONS + token)
    half = tl.arange(0, D // 2)
    cos = tl.load(COS + position * D + half)[None, :]
    sin = tl.load(SIN + position * D + half)[None, :]
    h = tl.arange(0, BH)[:, None]
    for which in tl.static_range(2):
        if which == 0:
            X = Q + token * q_heads * D
            live = h < q_heads
        else:
            X = K + token * k_heads * D
            live = h < k_heads
        left = tl.load(X + h * D + half[None, :], mask=live, other=0)
        right = tl.load(X + h * D + D // 2 + half[None, :], mask=live, other=0)
        tl.store(X + h * D + half[None, :], left * cos - right * sin, mask=live)
        tl.store(X + h * D + D // 2 + half[None, :], right * cos + left * sin, mask=live)


def rope_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    _rope_half[(q.shape[0],)](q, k, cos, sin, positions, q.shape[1], k.shape[1], D=q.shape[2], BH=4)
    return q, k


def _rope_half_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        c, s = (table[positions][:, None, : x.shape[-1] // 2] for table in (cos, sin))
        return torch.cat([left * c - right * s, right * c + left * s], -1)

    return turn(q), turn(k)


@triton.jit
def _pairs(A, B, SUMS, JOINED, N: tl.constexpr):
    c = tl.arange(0, N)
    a = tl.load(A + c)
    b = tl.load(B + c)
    both = tl.join(a, b * b)
    low, high = tl.split(tl.trans(tl.reshape(tl.trans(both), (2, 2, N // 2)), 0, 2, 1))
    tl.store(SUMS + tl.arange(0, 2)[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :], low * high)
    tl.store(JOINED + tl.arange(0, 2 * N), tl.cat(a, b, can_reorder=True))


def pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The order of `tl.cat` is not promised, so the concatenation is compared sorted."""
    products = torch.empty((2, a.numel() // 2), dtype=a.dtype, device=a.device)
    joined = torch.empty(2 * a.numel(), dtype=a.dtype, device=a.device)
    _pairs[(1,)](a, b, products, joined, N=a.numel())
    return products, joined.sort().values


def _pairs_reference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    half = a.numel() // 2
    products = torch.stack([a[:half] * a[half:], (b[:half] * b[half:]) ** 2])
    return products, torch.cat([a, b]).sort().values


@triton.jit
def _equalize(X, LEVEL, COUNTS, Y, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o < n
    level = tl.load(LEVEL + o, mask=live, other=0)
    counts = tl.histogram(level, BINS, mask=live)
    tl.store(COUNTS + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)
    share = tl.cumsum(counts.to(tl.float32), 0) / tl.sum(counts)
    x = tl.load(X + o, mask=live, other=0.0)
    tl.store(Y + o, x * tl.gather(share, level, 0), mask=live)


def equalize(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    blocks = triton.cdiv(x.numel(), 32)
    counts = torch.empty((blocks, 8), dtype=torch.int32, device=x.device)
    y = torch.empty_like(x)
    _equalize[(blocks,)](x, level, counts, y, x.numel(), BLOCK=32, BINS=8)
    return counts, y


def _equalize_reference(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.stack([part.bincount(minlength=8) for part in level.long().split(32)])
    share = counts.double().cumsum(1) / counts.sum(1, keepdim=True)
    return counts, x * torch.cat([s[part.long()] for s, part in zip(share, level.split(32), strict=True)])


@triton.jit
def _median_of_window(X, Y, n):
    # three comparisons find the median of three
    o = tl.program_id(0)
    a = tl.load(X + tl.maximum(o - 1, 0))
    b = tl.load(X + o)
    c = tl.load(X + tl.minimum(o + 1, n - 1))
    tl.store(Y + o, tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c)))


def median_filter(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _median_of_window[(x.numel(),)](x, y, x.numel())
    return y


def _median_reference(x: Tensor) -> Tensor:
    wide = torch.cat([x[:1], x, x[-1:]])
    windows = wide.unfold(0, 3, 1)
    return windows.gather(1, windows.detach().median(1, keepdim=True).indices)[:, 0]


def _rope_args() -> tuple[Tensor, ...]:
    angle = torch.randn(20, 16)
    return torch.randn(5, 3, 16), torch.randn(5, 2, 16), angle.cos(), angle.sin(), torch.randint(0, 20, (5,))


CASES = [
    *in_dtypes(
        Case(
            "sort_both_ways",
            sort_rows,
            lambda: (torch.randn(3, 32),),
            lambda x: (x.sort(-1).values, (x * x).sort(-1, descending=True).values),
        ),
        HALF,
        BF16,
    ),
    Case("sort_tile_ranked", sort_tile, lambda: (torch.randn(4, 16),), lambda x: x.sort(1).values * torch.arange(16)),
    *in_dtypes(
        Case("topk", topk, lambda: (torch.randn(3, 32), 8), lambda x, k: x.topk(k).values),
        HALF,
    ),
    *in_dtypes(
        Case("flip", flip, lambda: (torch.randn(4, 8), torch.randn(8)), lambda x, w: x.flip(0) + x.flip(1) * w.flip(0)),
        BF16,
    ),
    Case("bitonic_by_gather", bitonic, lambda: (torch.randn(2, 16),), lambda x: x.sort(-1).values),
    *in_dtypes(
        Case(
            "rope_interleaved",
            rope_interleaved,
            lambda: (torch.randn(5, 2, 16), torch.randn(5, 8), torch.randn(5, 8)),
            _rope_interleaved_reference,
        ),
        HALF,
    ),
    *in_dtypes(Case("rope_half_in_place", rope_half, _rope_args, _rope_half_reference), BF16),
    Case("join_split_cat", pairs, lambda: (torch.randn(16), torch.randn(16)), _pairs_reference),
    Case(
        "histogram_equalize",
        equalize,
        lambda: (torch.randn(75), torch.randint(0, 8, (75,), dtype=torch.int32)),
        _equalize_reference,
    ),
    Case("median_filter", median_filter, lambda: (torch.randn(30),), _median_reference),
]
