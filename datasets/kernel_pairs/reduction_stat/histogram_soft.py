"""Soft histogram of rows with triangular bins: each value touches two bins, whose cotangents it reads back.

h[m, k] = sum over n of relu(1 - |u - k|) with u = (x - start) / width. The forward adds whole rows of bins without
atomics; the backward is local: dx = (dh[k + 1] - dh[k]) / width for k = floor(u), and half or nothing past the ends.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "histogram_soft",
    "family": "reduction_stat",
    "op": "soft_histogram",
    "schema": 1,
    "techniques": ("gather-form", "elementwise", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _histogram_fwd(X, H, N, K, origin, inverse_width, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # A program owns a few bins of a row and reads the row: bins need no atomics, values are served by L2.
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        u = (x - origin) * inverse_width
        near = tl.maximum(1.0 - tl.abs(u[:, None] - k[None, :].to(tl.float32)), 0.0)
        weights += tl.where(n[:, None] < N, near, 0.0)
    tl.store(H + row * K + k, tl.sum(weights, 0), mask=k < K)


def forward(x, bins, start, width):
    """x (M, N) to (M, bins), with bin k centred at start + k width."""
    x = x.contiguous()
    M, N = x.shape
    h = torch.empty(M, bins, device=x.device, dtype=x.dtype)
    BLOCK_K = min(32, triton.next_power_of_2(bins))
    _histogram_fwd[(M, triton.cdiv(bins, BLOCK_K))](
        x, h, N, bins, start, 1.0 / width, BLOCK_N=64, BLOCK_K=BLOCK_K, num_warps=4
    )
    return h, (x, bins, start, width)


# --- backward ---
@triton.jit
def _histogram_bwd(DH, X, DX, N, K, origin, inverse_width, dh_m, dh_k, BLOCK_N: tl.constexpr):
    # The row's cotangent, a few hundred numbers, stays in L1 under these random reads.
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    # Far away values would not fit an integer, and reach no bin at all.
    u = tl.minimum(tl.maximum((x - origin) * inverse_width, -2.0), K + 1.0)
    k = tl.floor(u).to(tl.int32)
    bins = DH + row * dh_m
    left = tl.load(bins + k.to(tl.int64) * dh_k, mask=(n < N) & (k >= 0) & (k < K), other=0.0).to(tl.float32)
    k += 1
    right = tl.load(bins + k.to(tl.int64) * dh_k, mask=(n < N) & (k >= 0) & (k < K), other=0.0).to(tl.float32)
    tl.store(DX + row * N + n, (right - left) * inverse_width, mask=n < N)


def backward(saved, grad_h, needs=None):
    x, bins, start, width = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    _histogram_bwd[(M, triton.cdiv(N, BLOCK_N))](
        grad_h, x, dx, N, bins, start, 1.0 / width, *grad_h.stride(),
        BLOCK_N=BLOCK_N, num_warps=max(1, min(4, BLOCK_N // 128)),
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 4, "N": 128, "bins": 16}, {"M": 3, "N": 203, "bins": 37})
BENCH = ({"M": 1024, "N": 65536, "bins": 64, "dtype": "float32"},)


def make_args(M, N, bins, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The outer bins stand at -2 and 2: some values fall beyond them.
    return x, bins, -2.0, 4.0 / max(1, bins - 1)


def reference(x, bins, start, width):
    u = (x.float() - start) / width
    h = torch.zeros(x.shape[0], bins + 2, device=x.device, dtype=u.dtype)
    # Two spare bins take what falls beyond the ends.
    u = u.clamp(-1.0, bins)
    low = u.floor().clamp(max=bins - 1)
    share = u - low
    h = h.scatter_add(1, low.long() + 1, 1.0 - share).scatter_add(1, low.long() + 2, share)
    return h[:, 1:-1].to(x.dtype)
