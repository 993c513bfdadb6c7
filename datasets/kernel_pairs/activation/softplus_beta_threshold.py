"""Softplus with beta, linear beyond a threshold: the derivative is one there, and a sigmoid below, in one selection.

log(1 + exp(z)) = max(z, 0) + log1p(exp(-|z|)) overflows nowhere, and log1p keeps the tail where exp(z) is smaller than
an ulp of one. The backward decides by the same comparison of the same product as the forward.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "softplus_beta_threshold",
    "family": "activation",
    "op": "softplus",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _softplus_fwd(X, Y, N, beta, threshold, x_row, x_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    x = tl.load(X + row * x_row + c * x_col, mask=c < N, other=0.0).to(tl.float32)
    z = beta * x
    soft = (tl.maximum(z, 0.0) + libdevice.log1p(tl.exp(-tl.abs(z)))) / beta
    tl.store(Y + row * N + c, tl.where(z > threshold, x, soft), mask=c < N)


def _columns(N):
    return max(64, min(2048, triton.next_power_of_2(N)))


def forward(x, beta, threshold):
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = _columns(N)
    _softplus_fwd[(M, triton.cdiv(N, BLOCK))](x, y, N, beta, threshold, *x.stride(), BLOCK=BLOCK)
    return y, (x, beta, threshold)


# --- backward ---
@triton.jit
def _softplus_bwd(DY, X, DX, N, beta, threshold, dy_row, dy_col, x_row, x_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    x = tl.load(X + row * x_row + c * x_col, mask=c < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + c * dy_col, mask=c < N, other=0.0).to(tl.float32)
    z = beta * x
    t = tl.exp(-tl.abs(z))
    slope = tl.where(z < 0, t, 1.0) / (1.0 + t)
    tl.store(DX + row * N + c, dy * tl.where(z > threshold, 1.0, slope), mask=c < N)


def backward(saved, grad_y, needs=None):
    x, beta, threshold = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = _columns(N)
    _softplus_bwd[(M, triton.cdiv(N, BLOCK))](
        grad_y, x, dx, N, beta, threshold, *grad_y.stride(), *x.stride(), BLOCK=BLOCK
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 16, "N": 128, "beta": 1.0, "threshold": 2.0, "dtype": "float16"},
    {"M": 7, "N": 203, "beta": 2.5, "threshold": 3.0},
    {"M": 5, "N": 256, "beta": 0.5, "threshold": 1.0, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 8192, "beta": 1.0, "threshold": 20.0, "dtype": "bfloat16"},)


def make_args(M, N, beta, threshold, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    return x, beta, threshold


def reference(x, beta, threshold):
    return torch.nn.functional.softplus(x.float(), beta, threshold).to(x.dtype)
