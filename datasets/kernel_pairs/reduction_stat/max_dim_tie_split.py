"""Row maximum whose gradient is shared by all that reach it: the row's owner counts the ties, then hands out shares.

This is the symmetric subgradient of amax. Nothing but the maximum is saved: comparing with it finds the ties again.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "max_dim_tie_split",
    "family": "reduction_stat",
    "op": "amax",
    "schema": 1,
    "techniques": ("argmax-routing", "saved-output", "two-pass", "row-local", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 (M)",),
    "grads": ("x",),
    "gradient": "custom",
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _amax_fwd(X, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    best = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        best = tl.maximum(best, tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=float("-inf")).to(tl.float32))
    tl.store(Y + m, tl.max(best, 1), mask=m < M)


def _tile(N):
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    return max(1, 2048 // BLOCK_N), BLOCK_N


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N = _tile(N)
    _amax_fwd[(triton.cdiv(M, BLOCK_M),)](x, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return y, (x, y)


# --- backward ---
@triton.jit
def _amax_bwd(DY, X, Y, DX, M, N, dy_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # The maximum is one of the row's own values: it was rounded by nothing, and equality is exact.
    top = tl.load(Y + m, mask=m < M, other=0.0)[:, None]
    ties = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in tl.range(0, N, BLOCK_N, num_stages=2):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0)
        ties += (ok & (x == top)).to(tl.int32)
    dy = tl.load(DY + m * dy_m, mask=m < M, other=0.0).to(tl.float32)
    share = (dy / tl.maximum(tl.sum(ties, 1), 1).to(tl.float32))[:, None]
    # The row is still in L2, or for short rows in L1.
    for start in tl.range(0, N, BLOCK_N, num_stages=3):
        n = start + tl.arange(0, BLOCK_N)
        at = m[:, None] * N + n[None, :]
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + at, mask=ok, other=0.0)
        tl.store(DX + at, tl.where(x == top, share, 0.0), mask=ok)


def backward(saved, grad_y, needs=None):
    x, y = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_M, BLOCK_N = _tile(N)
    _amax_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_y, x, y, dx, M, N, grad_y.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 1037}, {"M": 21, "N": 72, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Steps of one half: many rows have several maxima.
    x = (2.0 * torch.randn(M, N, generator=g)).round() / 2.0
    return (x.to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.amax(-1)


def surrogate(x):
    return x.amax(-1)
