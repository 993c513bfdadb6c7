"""Spectral normalisation W / sigma with sigma = u^T W v for constant u and v: elementwise but for a rank-1 correction.

dW = (G - (<G, W> / sigma) u v^T) / sigma. The one number <G, W> is a sum over the whole matrix: the first launch leaves
a partial of it for every eight rows, and every program of the second adds the partials, a few KiB, before its tile.
sigma is taken the same way in the forward, and saved.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "spectral_norm_step",
    "family": "norm_channel",
    "op": "spectral_norm",
    "schema": 1,
    "techniques": (
        "scalar-gradient",
        "two-stage-partials",
        "saved-statistics",
        "partial-gradient",
        "strided-cotangent",
    ),
    "saves": ("sigma: fp32 (1,)",),
    "grads": ("weight",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sum_of(Parts, count, BLOCK: tl.constexpr):
    """All of a short buffer, added by every program that asks."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        total += tl.load(Parts + start + i, mask=start + i < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _bilinear_parts(W, U, V, Parts, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # A program takes ROWS rows: the sum of u[n] <W[n], v>.
    n = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    u = tl.load(U + n, mask=n < N, other=0.0).to(tl.float32)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        k = (start + tl.arange(0, BLOCK))[None, :]
        w = tl.load(W + n * K + k, mask=(n < N) & (k < K), other=0.0).to(tl.float32)
        acc += w * tl.load(V + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(Parts + tl.program_id(0), tl.sum(acc * u))


@triton.jit
def _divide_by_sigma(W, Parts, Out, Sigma, count, size, BLOCK: tl.constexpr):
    sigma = _sum_of(Parts, count, 1024)
    if tl.program_id(0) == 0:
        tl.store(Sigma, sigma)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(Out + i, w / sigma, mask=i < size)


def _rows_tile(K):
    return {"ROWS": 8, "BLOCK": max(32, min(256, triton.next_power_of_2(K)))}


def forward(weight, u, v):
    weight, u, v = weight.contiguous(), u.contiguous(), v.contiguous()
    N, K = weight.shape
    out = torch.empty_like(weight)
    count = triton.cdiv(N, 8)
    parts = torch.empty(count, device=weight.device, dtype=torch.float32)
    sigma = torch.empty(1, device=weight.device, dtype=torch.float32)
    _bilinear_parts[(count,)](weight, u, v, parts, N, K, **_rows_tile(K))
    _divide_by_sigma[(triton.cdiv(N * K, 8192),)](weight, parts, out, sigma, count, N * K, BLOCK=8192, num_warps=8)
    return out, (weight, u, v, sigma)


# --- backward ---
@triton.jit
def _inner_product_parts(G, W, Parts, N, K, g_n, g_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    n = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=3):
        k = (start + tl.arange(0, BLOCK))[None, :]
        ok = (n < N) & (k < K)
        g = tl.load(G + n * g_n + k.to(tl.int64) * g_k, mask=ok, other=0.0).to(tl.float32)
        acc += g * tl.load(W + n * K + k, mask=ok, other=0.0).to(tl.float32)
    tl.store(Parts + tl.program_id(0), tl.sum(acc))


@triton.jit
def _rank_one_correction(
    G, U, V, Sigma, Parts, DW, N, K, count, g_n, g_k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    ok = (n[:, None] < N) & (k[None, :] < K)
    inv = 1.0 / tl.load(Sigma)
    pull = _sum_of(Parts, count, 1024) * inv
    u = tl.load(U + n, mask=n < N, other=0.0).to(tl.float32)
    v = tl.load(V + k, mask=k < K, other=0.0).to(tl.float32)
    g_at = n[:, None].to(tl.int64) * g_n + k[None, :].to(tl.int64) * g_k
    g = tl.load(G + g_at, mask=ok, other=0.0).to(tl.float32)
    dw = inv * (g - pull * u[:, None] * v[None, :])
    tl.store(DW + n[:, None].to(tl.int64) * K + k[None, :], dw, mask=ok)


def backward(saved, grad_out, needs=None):
    weight, u, v, sigma = saved
    N, K = weight.shape
    count = triton.cdiv(N, 8)
    parts = torch.empty(count, device=weight.device, dtype=torch.float32)
    dw = torch.empty_like(weight)
    _inner_product_parts[(count,)](
        grad_out, weight, parts, N, K, grad_out.stride(0), grad_out.stride(1), **_rows_tile(K)
    )
    _rank_one_correction[(triton.cdiv(K, 256), triton.cdiv(N, 32))](
        grad_out, u, v, sigma, parts, dw, N, K, count, grad_out.stride(0), grad_out.stride(1),
        BLOCK_N=32, BLOCK_K=256, num_warps=8,
    )  # fmt: skip
    return dw


# --- check ---
SWEEP = (
    {"N": 24, "K": 64},
    {"N": 37, "K": 83, "dtype": "float16"},
    {"N": 16, "K": 96, "dtype": "bfloat16"},
)
BENCH = ({"N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=g) * K**-0.5
    # Unit vectors as after a step of power iteration, constants of the operator.
    v = torch.nn.functional.normalize(torch.randn(K, generator=g), dim=0)
    u = torch.nn.functional.normalize(weight @ v, dim=0)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (weight, u, v))


def reference(weight, u, v):
    sigma = (u.float() * (weight @ v).float()).sum()
    return (weight.float() / sigma).to(weight.dtype)
