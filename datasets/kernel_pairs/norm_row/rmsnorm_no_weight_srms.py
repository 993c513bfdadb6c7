"""SimpleRMSNorm, y = x / rms(x) without weights: dx is dy freed of its part along x, and nothing but x is kept.

dx = (dy - xhat * mean(dy * xhat)) / rms. Both row sums, of x * x and of dy * x, are taken in one reduction of the same
registers: the projection needs only their quotient, so 1/rms need not be known before it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_no_weight_srms",
    "family": "norm_row",
    "op": "rms_norm",
    "schema": 1,
    "techniques": ("row-local", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _srms_fwd(X, Y, N, x_row, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_row + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, x * tl.rsqrt(tl.sum(x * x, 0) / N + eps), mask=n < N)


def _launch(N):
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def forward(x, eps=1e-6):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _srms_fwd[(M,)](x, y, N, x.stride(0), eps, **_launch(N))
    return y, (x, eps)


# --- backward ---
@triton.jit
def _add_both(xx_a, gx_a, xx_b, gx_b):
    return xx_a + xx_b, gx_a + gx_b


@triton.jit
def _srms_bwd(DY, X, DX, N, x_row, dy_row, dy_col, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_row + n, mask=n < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + n * dy_col, mask=n < N, other=0.0).to(tl.float32)
    # One tree for two sums: half the exchanges between warps.
    xx, gx = tl.reduce((x * x, dy * x), 0, _add_both)
    power = xx / N + eps
    tl.store(DX + row * N + n, tl.rsqrt(power) * (dy - x * (gx / N / power)), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, eps = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _srms_bwd[(M,)](grad_y, x, dx, N, x.stride(0), grad_y.stride(0), grad_y.stride(1), eps, **_launch(N))
    return dx


# --- check ---
SWEEP = (
    {"M": 6, "N": 64},
    {"M": 11, "N": 93, "dtype": "float16"},
    {"M": 7, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((torch.randn(M, N, generator=g) * 1.3 + 0.2).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x, eps=1e-6):
    return torch.nn.functional.rms_norm(x.float(), (x.shape[1],), eps=eps).to(x.dtype)
