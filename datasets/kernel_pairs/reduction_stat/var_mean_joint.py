"""Variance and mean of each row in one read: their two cotangents meet in one elementwise pass, either may be absent.

dx = dmean / N + 2 dvar (x - mean) / (N - 1). Without a cotangent for the variance x is not even read.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "var_mean_joint",
    "family": "reduction_stat",
    "op": "var_mean",
    "schema": 1,
    "techniques": ("saved-statistics", "optional-cotangent", "broadcast-adjoint", "strided-cotangent"),
    "saves": ("center: fp32 (M)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _merge_moments(count, mean, square, count_new, mean_new, square_new):
    # Chan's rule: moments of two disjoint samples, without the cancellation of raw sums of squares.
    total = count + count_new
    part = count_new / tl.where(total > 0.0, total, 1.0)
    shift = mean_new - mean
    return total, mean + shift * part, square + square_new + shift * shift * count * part


@triton.jit
def _moments_fwd(X, Var, Mean, Center, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Welford's update in every lane, one merge of the lanes at the end.
    count = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    square = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        count += tl.where(ok, 1.0, 0.0)
        shift = tl.where(ok, x - mean, 0.0)
        mean += shift / tl.maximum(count, 1.0)
        square += shift * tl.where(ok, x - mean, 0.0)
    count, mean, square = tl.reduce((count, mean, square), 1, _merge_moments)
    tl.store(Var + m, square / (N - 1), mask=m < M)
    tl.store(Mean + m, mean, mask=m < M)
    tl.store(Center + m, mean, mask=m < M)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    var, mean = (torch.empty(M, device=x.device, dtype=x.dtype) for _ in range(2))
    # The mean once more in fp32: deviations from a mean rounded to bf16 would be off by more than they are.
    center = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK_N = min(512, triton.next_power_of_2(N))
    BLOCK_M = max(1, 1024 // BLOCK_N)
    _moments_fwd[(triton.cdiv(M, BLOCK_M),)](x, var, mean, center, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return (var, mean), (x, center)


# --- backward ---
@triton.jit
def _moments_bwd(
    DVar, DMean, X, Center, DX, M, N, dvar_m, dmean_m,
    HAS_VAR: tl.constexpr, HAS_MEAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = m[:, None] * N + n[None, :]
    ok = (m[:, None] < M) & (n[None, :] < N)
    dx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HAS_MEAN:
        dx += (tl.load(DMean + m * dmean_m, mask=m < M, other=0.0).to(tl.float32) / N)[:, None]
    if HAS_VAR:
        slope = 2.0 / (N - 1) * tl.load(DVar + m * dvar_m, mask=m < M, other=0.0).to(tl.float32)
        center = tl.load(Center + m, mask=m < M, other=0.0)
        dx += slope[:, None] * (tl.load(X + at, mask=ok, other=0.0).to(tl.float32) - center[:, None])
    tl.store(DX + at, dx, mask=ok)


def backward(saved, grad_var, grad_mean, needs=None):
    x, center = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    dvar, dmean = (center if grad is None else grad for grad in (grad_var, grad_mean))
    _moments_bwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        dvar, dmean, x, center, dx, M, N, dvar.stride(0), dmean.stride(0),
        HAS_VAR=grad_var is not None, HAS_MEAN=grad_mean is not None,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 1037}, {"M": 21, "N": 72, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    if N < 2:
        raise ValueError("the unbiased variance needs two values")
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(M, N, generator=g) - 2.0).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    var, mean = torch.var_mean(x.float(), -1)
    return var.to(x.dtype), mean.to(x.dtype)
