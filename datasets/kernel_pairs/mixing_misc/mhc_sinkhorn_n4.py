"""Doubly stochastic mixing matrices by Sinkhorn steps: saved sums let the backward undo each step in registers."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mhc_sinkhorn_n4",
    "family": "mixing_misc",
    "op": "sinkhorn",
    "schema": 1,
    "techniques": ("row-local", "multi-row-tile", "saved-output", "saved-statistics", "strided-cotangent"),
    "saves": ("p: fp32 (M, n, n)", "sums: fp32 (iters, 2, n, M)"),
    "grads": ("logits",),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sinkhorn_fwd(Logits, P, Sums, M, ITERS, N: tl.constexpr, BLOCK_M: tl.constexpr):
    # One small matrix per token; a tile holds BLOCK_M of them as (token, row, column).
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, N)
    at = token[:, None, None] * N * N + i[None, :, None] * N + i[None, None, :]
    ok = (token < M)[:, None, None]
    # Sums lie with the tokens innermost, so that a warp stores neighbours.
    sums_at = Sums + i[None, :].to(tl.int64) * M + token[:, None]
    logits = tl.load(Logits + at, mask=ok, other=0.0).to(tl.float32)
    p = tl.exp(logits - tl.max(logits, 2)[:, :, None])
    for _ in range(ITERS):
        rows = tl.sum(p, 2)
        p = p / rows[:, :, None]
        columns = tl.sum(p, 1)
        p = p / columns[:, None, :]
        tl.store(sums_at, rows, mask=token[:, None] < M)
        tl.store(sums_at + N * M, columns, mask=token[:, None] < M)
        sums_at += 2 * N * M
    tl.store(P + at, p, mask=ok)


def forward(logits, iters=20):
    # n is a power of two; a batch of matrices (M, n, n) in fp32, as the mixing coefficients of a layer are kept.
    logits = logits.contiguous()
    M, N, _ = logits.shape
    p = torch.empty_like(logits)
    sums = torch.empty(iters, 2, N, M, device=logits.device, dtype=torch.float32)
    _sinkhorn_fwd[(triton.cdiv(M, 64),)](logits, p, sums, M, iters, N=N, BLOCK_M=64, num_warps=2)
    return p, (p, sums)


# --- backward ---
@triton.jit
def _sinkhorn_bwd(DP, P, Sums, DLogits, M, ITERS, dp_m, dp_i, dp_j, N: tl.constexpr, BLOCK_M: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, N)
    at = token[:, None, None] * N * N + i[None, :, None] * N + i[None, None, :]
    ok = (token < M)[:, None, None]
    sums_at = Sums + ((2 * ITERS - 2) * N + i[None, :].to(tl.int64)) * M + token[:, None]
    p = tl.load(P + at, mask=ok, other=0.0).to(tl.float32)
    dp_at = token[:, None, None] * dp_m + i[None, :, None] * dp_i + i[None, None, :] * dp_j
    dp = tl.load(DP + dp_at, mask=ok, other=0.0).to(tl.float32)
    for _ in range(ITERS):
        # q = p / sum(p): dp = (dq - <dq, q>) / sum. Multiplying by the sum restores p, so no step's matrix is saved.
        columns = tl.load(sums_at + N * M, mask=token[:, None] < M, other=1.0)
        dp = (dp - tl.sum(dp * p, 1)[:, None, :]) / columns[:, None, :]
        p = p * columns[:, None, :]
        rows = tl.load(sums_at, mask=token[:, None] < M, other=1.0)
        dp = (dp - tl.sum(dp * p, 2)[:, :, None]) / rows[:, :, None]
        p = p * rows[:, :, None]
        sums_at -= 2 * N * M
    # The first row step cancels any shift of a row: the maximum that was taken off has no gradient.
    tl.store(DLogits + at, dp * p, mask=ok)


def backward(saved, grad_p, needs=None):
    p, sums = saved
    M, N, _ = p.shape
    dlogits = torch.empty_like(p)
    _sinkhorn_bwd[(triton.cdiv(M, 64),)](
        grad_p, p, sums, dlogits, M, sums.shape[0], *grad_p.stride(), N=N, BLOCK_M=64, num_warps=2
    )
    return dlogits


# --- check ---
SWEEP = ({"M": 64}, {"M": 77, "iters": 7}, {"M": 20, "n": 2, "iters": 3})
BENCH = ({"M": 524288, "dtype": "float32"},)


def make_args(M, n=4, iters=20, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Spread wide enough that 20 steps do not converge to the last digit.
    logits = 2.0 * torch.randn(M, n, n, generator=g)
    return logits.to(device=device, dtype=getattr(torch, dtype)), iters


def reference(logits, iters=20):
    p = logits.float().softmax(2)
    for step in range(iters):
        if step:
            p = p / p.sum(2, keepdim=True)
        p = p / p.sum(1, keepdim=True)
    return p.to(logits.dtype)
