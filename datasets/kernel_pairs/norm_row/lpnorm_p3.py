"""Division by the p-norm for any p > 1, y = x / ||x||_p: powers of |x| with the sign put back, and zero safe.

d||x||_p / dx = sign(x) (|x| / ||x||)^(p-1), so dx = (dy - c * sign(x) (|x| / ||x||)^(p-1)) / ||x|| with c the row sum
of dy * y. The power is exp2 of a logarithm, taken of ratios at most 1 and replaced by zero where x is zero.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lpnorm_p3",
    "family": "norm_row",
    "op": "lp_normalize",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "masking", "strided-cotangent"),
    "saves": ("inv_norm: fp32 (M,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _power(a, p):
    """a to the p for a >= 0 and p > 0, zero at zero."""
    return tl.where(a > 0.0, tl.exp2(p * tl.log2(tl.where(a > 0.0, a, 1.0))), 0.0)


@triton.jit
def _lp_fwd(X, Y, InvNorm, N, p, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    # Relative to the largest element no power overflows; a row of zeros is divided by one.
    top = tl.max(tl.abs(x), 0)
    top = tl.where(top > 0.0, top, 1.0)
    total = tl.sum(_power(tl.abs(x) / top, p), 0)
    norm = top * tl.where(total > 0.0, _power(total, 1.0 / p), 1.0)
    tl.store(InvNorm + row, 1.0 / norm)
    tl.store(Y + row * N + n, x / norm, mask=n < N)


def _launch(N):
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def forward(x, p):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    inv_norm = torch.empty(M, device=x.device, dtype=torch.float32)
    _lp_fwd[(M,)](x, y, inv_norm, N, p, **_launch(N))
    return y, (x, inv_norm, p)


# --- backward ---
@triton.jit
def _lp_bwd(DY, X, InvNorm, DX, N, p, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inv = tl.load(InvNorm + row)
    y = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32) * inv
    dy = tl.load(DY + row * dy_row + n * dy_col, mask=n < N, other=0.0).to(tl.float32)
    c = tl.sum(dy * y, 0)
    slope = _power(tl.abs(y), p - 1.0)
    tl.store(DX + row * N + n, inv * (dy - c * tl.where(y < 0.0, -slope, slope)), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, inv_norm, p = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    _lp_bwd[(M,)](grad_y, x, inv_norm, dx, N, p, grad_y.stride(0), grad_y.stride(1), **_launch(N))
    return dx


# --- check ---
SWEEP = (
    {"M": 9, "N": 64},
    {"M": 14, "N": 83, "P": 2.5, "dtype": "float16"},
    {"M": 8, "N": 128, "P": 4.0, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, P=3.0, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), P


def reference(x, p):
    xf = x.float()
    return (xf / torch.linalg.vector_norm(xf, p, dim=1, keepdim=True)).to(x.dtype)
