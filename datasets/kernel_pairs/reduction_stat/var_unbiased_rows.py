"""Unbiased variance of each row, nothing saved: the row's owner sums it again, then writes 2 dy (x - mean) / (N - 1).

The mean's own derivative needs no correction: the deviations of a row sum to zero. A row is read twice in quick
succession, the second time out of the cache, which costs less than a statistic kept alive from forward to backward.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "var_unbiased_rows",
    "family": "reduction_stat",
    "op": "var",
    "schema": 1,
    "techniques": ("recompute", "two-pass", "row-local", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _row_variance(X, Var, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # One pass by Welford's update: each lane has a count, a mean and a sum of squares around it, which cannot cancel as
    # E[x^2] - mean^2 would. They meet at the end.
    seen = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    spread = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        seen += tl.where(ok, 1.0, 0.0)
        gap = tl.where(ok, x - mean, 0.0)
        mean += gap / tl.maximum(seen, 1.0)
        spread += gap * (x - mean)
    off = mean - (tl.sum(mean * seen, 1) / N)[:, None]
    tl.store(Var + m, tl.sum(spread + seen * off * off, 1) / (N - 1), mask=m < M)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    var = torch.empty(M, device=x.device, dtype=x.dtype)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    _row_variance[(triton.cdiv(M, BLOCK_M),)](x, var, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return var, (x,)


# --- backward ---
@triton.jit
def _variance_bwd(DVar, X, DX, M, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    at = m[:, None] * N + n[None, :]
    lanes = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for left in range(N, 0, -BLOCK_N):
        ok = (m[:, None] < M) & (n[None, :] < left)
        lanes += tl.load(X + at + (N - left), mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(lanes, 1) / N
    slope = tl.load(DVar + m * stride, mask=m < M, other=0.0).to(tl.float32) * (2.0 / (N - 1))
    for left in range(N, 0, -BLOCK_N):
        ok = (m[:, None] < M) & (n[None, :] < left)
        x = tl.load(X + at + (N - left), mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + at + (N - left), slope[:, None] * (x - mean[:, None]), mask=ok)


def backward(saved, grad_var, needs=None):
    (x,) = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    _variance_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_var, x, dx, M, N, grad_var.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 1037}, {"M": 21, "N": 72, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    if N < 2:
        raise ValueError("the unbiased variance needs two values")
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(M, N, generator=g) + 3.0).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.float().var(-1).to(x.dtype)
