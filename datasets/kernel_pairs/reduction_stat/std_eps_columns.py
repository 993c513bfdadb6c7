"""Standard deviation of each column, sqrt(var + eps): rows are split for the moments, column statistics are saved.

The gradient dy (x - mean) / (M std) is elementwise; a program keeps the three numbers of its columns and walks rows.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "std_eps_columns",
    "family": "reduction_stat",
    "op": "std",
    "schema": 1,
    "techniques": ("saved-statistics", "column-owner", "two-stage-partials", "strided-cotangent"),
    "saves": ("stats: fp32 (2, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _column_moments(X, Parts, M, N, rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # Mean and summed squared deviation of the rows of one split, tile after tile by Chan's update.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    first = split * rows_each
    last = tl.minimum(first + rows_each, M)
    mean = tl.zeros((BLOCK_N,), tl.float32)
    square = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        ok = (m[:, None] < last) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        seen = (start - first).to(tl.float32)
        fresh = tl.minimum(last - start, BLOCK_M).to(tl.float32)
        here = tl.sum(x, 0) / fresh
        off = tl.where(ok, x - here[None, :], 0.0)
        shift = here - mean
        mean += shift * (fresh / (seen + fresh))
        square += tl.sum(off * off, 0) + shift * shift * (seen * fresh / (seen + fresh))
    tl.store(Parts + 2 * split * N + n, mean, mask=n < N)
    tl.store(Parts + (2 * split + 1) * N + n, square, mask=n < N)


@triton.jit
def _column_std(Parts, Y, Stats, M, N, splits, rows_each, eps, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    s = tl.arange(0, BLOCK_S)
    ok = (s[:, None] < splits) & (n[None, :] < N)
    means = tl.load(Parts + 2 * s[:, None] * N + n[None, :], mask=ok, other=0.0)
    squares = tl.load(Parts + (2 * s[:, None] + 1) * N + n[None, :], mask=ok, other=0.0)
    rows = tl.maximum(tl.minimum(M - s * rows_each, rows_each), 0).to(tl.float32)[:, None]
    mean = tl.sum(rows * means, 0) / M
    off = tl.where(ok, means - mean[None, :], 0.0)
    std = tl.sqrt(tl.sum(squares + rows * off * off, 0) / M + eps)
    tl.store(Y + n, std, mask=n < N)
    tl.store(Stats + n, mean, mask=n < N)
    tl.store(Stats + N + n, std, mask=n < N)


def forward(x, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(N, device=x.device, dtype=x.dtype)
    stats = torch.empty(2, N, device=x.device, dtype=torch.float32)
    BLOCK_N = min(128, triton.next_power_of_2(N))
    tiles = triton.cdiv(N, BLOCK_N)
    # Four programs for each of 132 processors, at most 128 splits for the second launch to hold at once.
    splits = max(1, min(128, 528 // tiles, triton.cdiv(M, 32)))
    rows_each = triton.cdiv(M, splits)
    splits = triton.cdiv(M, rows_each)
    parts = torch.empty(splits, 2, N, device=x.device, dtype=torch.float32)
    _column_moments[(tiles, splits)](x, parts, M, N, rows_each, BLOCK_M=32, BLOCK_N=BLOCK_N, num_warps=4)
    _column_std[(triton.cdiv(N, 16),)](
        parts, y, stats, M, N, splits, rows_each, eps, BLOCK_S=triton.next_power_of_2(splits), BLOCK_N=16, num_warps=4
    )
    return y, (x, stats)


# --- backward ---
@triton.jit
def _column_std_bwd(DY, X, Stats, DX, M, N, rows_each, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dy = tl.load(DY + n.to(tl.int64) * dy_n, mask=n < N, other=0.0).to(tl.float32)
    mean = tl.load(Stats + n, mask=n < N, other=0.0)[None, :]
    std = tl.load(Stats + N + n, mask=n < N, other=1.0)
    slope = (dy / (std * M))[None, :]
    first = tl.program_id(1).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, M)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        at = m[:, None] * N + n[None, :]
        ok = (m[:, None] < last) & (n[None, :] < N)
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + at, slope * (x - mean), mask=ok)


def backward(saved, grad_y, needs=None):
    x, stats = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_N = min(256, triton.next_power_of_2(N))
    BLOCK_M = 4096 // BLOCK_N
    rows_each = 4 * BLOCK_M
    _column_std_bwd[(triton.cdiv(N, BLOCK_N), triton.cdiv(M, rows_each))](
        grad_y, x, stats, dx, M, N, rows_each, grad_y.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"M": 64, "N": 32}, {"M": 203, "N": 37}, {"M": 72, "N": 130, "dtype": "bfloat16"})
BENCH = ({"M": 65536, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(M, N, generator=g) + 2.0).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x, eps=1e-5):
    return (x.float().var(0, unbiased=False) + eps).sqrt().to(x.dtype)
