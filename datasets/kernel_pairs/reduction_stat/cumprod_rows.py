"""Cumulative product along rows: the adjoint is a linear recurrence from the right, which never divides by x.

    dx[n] = y[n - 1] s[n],    s[n] = dy[n] + x[n + 1] s[n + 1]

s is scanned in tiles from right to left that pass on one number a row. Zeros among the factors are ordinary values;
the usual form, a reversed sum of dy y over x, breaks at the first of them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cumprod_rows",
    "family": "reduction_stat",
    "op": "cumprod",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "saved-output", "multi-row-tile", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _cumprod_fwd(X, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)[None, :]
    so_far = tl.full((BLOCK_M,), 1.0, tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + lane
        ok = (m[:, None] < M) & (n < N)
        x = tl.load(X + m[:, None] * N + n, mask=ok, other=1.0).to(tl.float32)
        y = so_far[:, None] * tl.associative_scan(x, 1, _times)
        tl.store(Y + m[:, None] * N + n, y, mask=ok)
        so_far = tl.sum(tl.where(lane == BLOCK_N - 1, y, 0.0), 1)


def _tile(N):
    BLOCK_N = max(16, min(1024, triton.next_power_of_2(N)))
    return 1024 // BLOCK_N, BLOCK_N


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_M, BLOCK_N = _tile(N)
    _cumprod_fwd[(triton.cdiv(M, BLOCK_M),)](x, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return y, (x, y)


# --- backward ---
@triton.jit
def _follow(factor1, term1, factor2, term2):
    # First step 1, then step 2, of s -> term + factor s.
    return factor1 * factor2, term2 + factor2 * term1


@triton.jit
def _columns(words, WORDS: tl.constexpr):
    """The eight elements of every word as tensors of their own: nothing leaves its lane."""
    even, odd = tl.split(tl.reshape(words, (WORDS, 4, 2)))
    a, c = tl.split(tl.reshape(even, (WORDS, 2, 2)))
    b, d = tl.split(tl.reshape(odd, (WORDS, 2, 2)))
    e0, e4 = tl.split(a)
    e1, e5 = tl.split(b)
    e2, e6 = tl.split(c)
    e3, e7 = tl.split(d)
    return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def _words(e0, e1, e2, e3, e4, e5, e6, e7, WORDS: tl.constexpr):
    even = tl.reshape(tl.join(tl.join(e0, e4), tl.join(e2, e6)), (WORDS, 4))
    odd = tl.reshape(tl.join(tl.join(e1, e5), tl.join(e3, e7)), (WORDS, 4))
    return tl.reshape(tl.join(even, odd), (WORDS, 8))


@triton.jit
def _cumprod_bwd(DY, X, Y, DX, N, dy_m, dy_n, WORDS: tl.constexpr):
    # Words of eight elements lie in a tile from right to left, so that the scan over words runs forwards: one backwards
    # would first exchange all its numbers between lanes. Within a word a lane walks by itself.
    m = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WORDS)
    eight = tl.arange(0, 8)[None, :]
    behind = tl.zeros((), tl.float32)
    tiles = tl.cdiv(N, WORDS * 8)
    for back in range(tiles):
        begin = ((tiles - back) * WORDS - 1 - lane) * 8
        n = begin[:, None] + eight
        ok = n < N
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(X + m * N + n, mask=ok, other=0.0).to(tl.float32)
        y = tl.load(Y + m * N + n, mask=ok, other=0.0).to(tl.float32)
        x8 = tl.load(X + m * N + begin + 8, mask=begin + 8 < N, other=0.0).to(tl.float32)
        before = tl.load(Y + m * N + begin - 1, mask=(begin > 0) & (begin <= N), other=1.0).to(tl.float32)
        d0, d1, d2, d3, d4, d5, d6, d7 = _columns(dy, WORDS)
        _, x1, x2, x3, x4, x5, x6, x7 = _columns(x, WORDS)
        y0, y1, y2, y3, y4, y5, y6, _ = _columns(y, WORDS)
        # What a word makes of s behind it: term + reach s.
        reach = ((x8 * x7) * (x6 * x5)) * ((x4 * x3) * (x2 * x1))
        term = d0 + x1 * (d1 + x2 * (d2 + x3 * (d3 + x4 * (d4 + x5 * (d5 + x6 * (d6 + x7 * d7))))))
        reach, term = tl.associative_scan((reach, term), 0, _follow)
        first = term + reach * behind
        # A word begins with what the one to the right of it ended with.
        s = tl.where(lane == 0, behind, tl.gather(first, tl.maximum(lane - 1, 0), 0))
        s7 = d7 + x8 * s
        s6 = d6 + x7 * s7
        s5 = d5 + x6 * s6
        s4 = d4 + x5 * s5
        s3 = d3 + x4 * s4
        s2 = d2 + x3 * s3
        s1 = d1 + x2 * s2
        s0 = d0 + x1 * s1
        dx = _words(before * s0, y0 * s1, y1 * s2, y2 * s3, y3 * s4, y4 * s5, y5 * s6, y6 * s7, WORDS)
        tl.store(DX + m * N + n, dx, mask=ok)
        behind = tl.sum(tl.where(lane == WORDS - 1, first, 0.0), 0)


def backward(saved, grad_y, needs=None):
    x, y = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    WORDS = max(16, min(256, triton.next_power_of_2(triton.cdiv(N, 8))))
    _cumprod_bwd[(M,)](grad_y, x, y, dx, N, *grad_y.stride(), WORDS=WORDS, num_warps=max(1, WORDS // 64))
    return dx


# --- check ---
SWEEP = ({"M": 9, "N": 128}, {"M": 3, "N": 2051}, {"M": 11, "N": 40, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = 1.0 + torch.randn(M, N, generator=g) / N**0.5
    # A zero in the second row, two in the third.
    x[1:3, N // 2] = 0.0
    x[2:3, N // 3] = 0.0
    return (x.to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.float().cumprod(-1).to(x.dtype)
