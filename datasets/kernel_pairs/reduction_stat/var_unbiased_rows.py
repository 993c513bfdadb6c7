"""Unbiased variance of each row: with the mean saved the gradient 2 dy (x - mean) / (N - 1) is elementwise.

Reducing (x - mean) needs no correction for the mean's own derivative: the deviations of a row sum to zero.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "var_unbiased_rows",
    "family": "reduction_stat",
    "op": "var",
    "schema": 1,
    "techniques": ("saved-statistics", "broadcast-adjoint", "multi-row-tile", "strided-cotangent"),
    "saves": ("mean: fp32 (M)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _row_variance(X, Var, Mean, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        total += tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(total, 1) / N
    # A second pass, out of cache for all but very long rows: E[x^2] - mean^2 would cancel.
    spread = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        deviation = tl.where(ok, x - mean[:, None], 0.0)
        spread += deviation * deviation
    tl.store(Mean + m, mean, mask=m < M)
    tl.store(Var + m, tl.sum(spread, 1) / (N - 1), mask=m < M)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    var = torch.empty(M, device=x.device, dtype=x.dtype)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    _row_variance[(triton.cdiv(M, BLOCK_M),)](x, var, mean, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return var, (x, mean)


# --- backward ---
@triton.jit
def _variance_bwd(DVar, X, Mean, DX, M, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slope = tl.load(DVar + m * stride, mask=m < M, other=0.0).to(tl.float32) * (2.0 / (N - 1))
    mean = tl.load(Mean + m, mask=m < M, other=0.0)
    ok = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(DX + m[:, None] * N + n[None, :], slope[:, None] * (x - mean[:, None]), mask=ok)


def backward(saved, grad_var, needs=None):
    x, mean = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    _variance_bwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        grad_var, x, mean, dx, M, N, grad_var.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
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
