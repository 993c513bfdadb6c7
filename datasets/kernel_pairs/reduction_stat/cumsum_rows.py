"""Cumulative sum along long rows: tiles carry a running total left to right, the adjoint carries it right to left."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cumsum_rows",
    "family": "reduction_stat",
    "op": "cumsum",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _cumsum_fwd(X, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    carry = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        prefix = carry[:, None] + tl.cumsum(x, 1)
        tl.store(Y + m[:, None] * N + n[None, :], prefix, mask=mask)
        # The tile's last column is the next carry: the same number a longer tile would have gone on with.
        carry = tl.sum(tl.where((tl.arange(0, BLOCK_N) == BLOCK_N - 1)[None, :], prefix, 0.0), 1)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = max(32, min(1024, triton.next_power_of_2(N) // 2))
    BLOCK_M = max(1, 512 // BLOCK_N)
    _cumsum_fwd[(triton.cdiv(M, BLOCK_M),)](x, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return y, (M, N)


# --- backward ---
@triton.jit
def _cumsum_bwd(DY, DX, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    carry = tl.zeros((BLOCK_M,), tl.float32)
    tiles = tl.cdiv(N, BLOCK_N)
    for i in range(tiles):
        n = (tiles - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (m[:, None] < M) & (n[None, :] < N)
        dy = tl.load(DY + m[:, None] * stride_m + n[None, :] * stride_n, mask=mask, other=0.0).to(tl.float32)
        suffix = carry[:, None] + tl.cumsum(dy, 1, reverse=True)
        tl.store(DX + m[:, None] * N + n[None, :], suffix, mask=mask)
        carry = tl.sum(tl.where((tl.arange(0, BLOCK_N) == 0)[None, :], suffix, 0.0), 1)


def backward(saved, grad_y, needs=None):
    M, N = saved
    dx = torch.empty(M, N, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_N = max(32, min(1024, triton.next_power_of_2(N) // 2))
    BLOCK_M = max(1, 512 // BLOCK_N)
    _cumsum_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_y, dx, M, N, grad_y.stride(0), grad_y.stride(1), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=2
    )
    return dx


# --- check ---
SWEEP = ({"M": 9, "N": 128}, {"M": 5, "N": 203, "dtype": "float16"}, {"M": 4, "N": 64, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 2048, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.float().cumsum(-1).to(x.dtype)
