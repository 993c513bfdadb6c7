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
def _cumprod_bwd(DY, X, Y, DX, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    lane = tl.arange(0, BLOCK_N)[None, :]
    behind = tl.zeros((BLOCK_M,), tl.float32)
    tiles = tl.cdiv(N, BLOCK_N)
    for back in range(tiles):
        n = (tiles - 1 - back) * BLOCK_N + lane
        ok = (m < M) & (n < N)
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        factor = tl.load(X + m * N + n + 1, mask=(m < M) & (n + 1 < N), other=0.0).to(tl.float32)
        before = tl.load(Y + m * N + n - 1, mask=ok & (n > 0), other=1.0).to(tl.float32)
        reach, s = tl.associative_scan((factor, dy), 1, _follow, reverse=True)
        s += reach * behind[:, None]
        tl.store(DX + m * N + n, before * s, mask=ok)
        behind = tl.sum(tl.where(lane == 0, s, 0.0), 1)


def backward(saved, grad_y, needs=None):
    x, y = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_M, BLOCK_N = _tile(N)
    _cumprod_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_y, x, y, dx, M, N, *grad_y.stride(), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
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
