"""Clipping of every row to norm c, y = x * min(1, c / ||x||): the saved factor tells clipped rows from untouched ones.

A row with factor 1 passes dy on, and its x is not even read. A clipped row is a point on the sphere: dx is dy without
its part along x, times the factor. The row's norm is c / factor, so the factor is all that is saved.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "powernorm_clip",
    "family": "norm_row",
    "op": "clip_norm",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "strided-cotangent"),
    "saves": ("factor: fp32 (M,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _clip_rows_fwd(X, Y, Factor, N, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, 0))
    # A row of zeros has factor 1: the quotient is only formed above the limit.
    factor = tl.where(norm > limit, limit / tl.maximum(norm, limit), 1.0)
    tl.store(Factor + row, factor)
    tl.store(Y + row * N + n, x * factor, mask=n < N)


def _launch(N):
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def forward(x, limit):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    factor = torch.empty(M, device=x.device, dtype=torch.float32)
    _clip_rows_fwd[(M,)](x, y, factor, N, limit, **_launch(N))
    return y, (x, factor, limit)


# --- backward ---
@triton.jit
def _clip_rows_bwd(DY, X, Factor, DX, N, limit, dy_m, dy_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    factor = tl.load(Factor + row)
    dy = tl.load(DY + row * dy_m + n * dy_n, mask=n < N, other=0.0).to(tl.float32)
    if factor < 1.0:
        # One over the norm is factor / limit: u is the unit vector along x.
        u = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32) * (factor / limit)
        dy = factor * (dy - u * tl.sum(dy * u, 0))
    tl.store(DX + row * N + n, dy, mask=n < N)


def backward(saved, grad_y, needs=None):
    x, factor, limit = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    _clip_rows_bwd[(M,)](grad_y, x, factor, dx, N, limit, grad_y.stride(0), grad_y.stride(1), **_launch(N))
    return dx


# --- check ---
SWEEP = (
    {"M": 9, "N": 64},
    {"M": 14, "N": 83, "dtype": "float16"},
    {"M": 8, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Every other row lies well inside the limit, the others well beyond it.
    size = torch.where(torch.arange(M) % 2 == 0, 0.4, 1.7)[:, None]
    x = torch.nn.functional.normalize(torch.randn(M, N, generator=g), dim=1) * size * 3.0
    return x.to(device=device, dtype=getattr(torch, dtype)), 3.0


def reference(x, limit):
    xf = x.float()
    norm = torch.linalg.vector_norm(xf, dim=1, keepdim=True)
    return torch.where(norm > limit, xf * (limit / norm), xf).to(x.dtype)
