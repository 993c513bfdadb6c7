"""All-pairs L1 distances: the gradient adds signs, which no matrix product can do, row of y after row of y.

dx[m, d] = sum over n of g[m, n] sign(x[m, d] - y[n, d]). A program with a tile of dx walks some of the rows of y: each
is one vector against the tile, so that nothing three-dimensional is held. Tiles are few, so rows are split, too, and
partial sums added. dy is the same launch with the roles exchanged.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "pairwise_dist_l1",
    "family": "reduction_stat",
    "op": "cdist",
    "schema": 1,
    "techniques": ("loop-swap", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "y"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _l1_fwd(X, Y, Out, M, N, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # One feature after the other: a column of x against a column of y updates the whole tile of distances.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for d in range(D):
        x = tl.load(X + m * D + d, mask=m < M, other=0.0).to(tl.float32)
        y = tl.load(Y + n * D + d, mask=n < N, other=0.0).to(tl.float32)
        total += tl.abs(x[:, None] - y[None, :])
    tl.store(Out + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, y):
    """x (M, D), y (N, D); the result is (M, N)."""
    x, y = x.contiguous(), y.contiguous()
    (M, D), N = x.shape, y.shape[0]
    out = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _l1_fwd[(triton.cdiv(M, 64), triton.cdiv(N, 64))](x, y, out, M, N, D, BLOCK_M=64, BLOCK_N=64, num_warps=4)
    return out, (x, y)


# --- backward ---
@triton.jit
def _signs_bwd(G, X, Y, Parts, M, N, D, g_m, g_n, rows_each, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    # A tile of dx over the rows of y of one split, which are a multiple of sixteen.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(2) * rows_each
    ok = (m[:, None] < M) & (d[None, :] < D)
    x = tl.load(X + m[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    dx = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    g_at = G + m * g_m + first.to(tl.int64) * g_n
    y_at = Y + first.to(tl.int64) * D + d
    for start in range(first, tl.minimum(first + rows_each, N), 16):
        # Sixteen rows unrolled: their loads are under way together, and share the sectors of g. They have a sum of
        # their own: added one by one to thousands before them, each would cost a rounding at the size of the whole.
        part = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for step in tl.static_range(16):
            there = start + step < N
            g = tl.load(g_at, mask=(m < M) & there, other=0.0).to(tl.float32)[:, None]
            y = tl.load(y_at, mask=(d < D) & there, other=0.0).to(tl.float32)[None, :]
            part += tl.where(x > y, g, tl.where(x < y, -g, 0.0))
            g_at += g_n
            y_at += D
        dx += part
    at = (tl.program_id(2).to(tl.int64) * M + m[:, None]) * D + d[None, :]
    tl.store(Parts + at, dx, mask=ok)


def _gradient_of_first(grad_out, g_m, g_n, x, y):
    (M, D), N = x.shape, y.shape[0]
    BLOCK_D = min(64, triton.next_power_of_2(D))
    BLOCK_M = 1024 // BLOCK_D
    grid = triton.cdiv(M, BLOCK_M), triton.cdiv(D, BLOCK_D)
    # About sixteen programs for each of 132 processors, but at least 64 rows of y for every partial sum.
    splits = max(1, min(triton.cdiv(N, 64), 2112 // (grid[0] * grid[1])))
    rows_each = triton.cdiv(triton.cdiv(N, splits), 16) * 16
    splits = triton.cdiv(N, rows_each)
    parts = torch.empty(splits, M, D, device=x.device, dtype=torch.float32)
    _signs_bwd[(*grid, splits)](
        grad_out, x, y, parts, M, N, D, g_m, g_n, rows_each, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, num_warps=4
    )
    return parts.sum(0).to(x.dtype)


def backward(saved, grad_out, needs=(True, True)):
    x, y = saved
    g_m, g_n = grad_out.stride()
    dx = _gradient_of_first(grad_out, g_m, g_n, x, y) if needs[0] else None
    dy = _gradient_of_first(grad_out, g_n, g_m, y, x) if needs[1] else None
    return dx, dy


# --- check ---
SWEEP = ({"M": 32, "N": 24, "D": 16}, {"M": 37, "N": 45, "D": 23}, {"M": 16, "N": 20, "D": 70, "dtype": "bfloat16"})
BENCH = ({"M": 4096, "N": 1536, "D": 32, "dtype": "float32"},)


def make_args(M, N, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(M, D, generator=g), torch.randn(N, D, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, y))


def reference(x, y):
    # torch.cdist fills a buffer of all differences in its backward, too; these the compiler fuses into the sums.
    return (x.float()[:, None] - y.float()).abs().sum(-1).to(x.dtype)
