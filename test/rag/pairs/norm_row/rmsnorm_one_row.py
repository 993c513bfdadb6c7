"""RMSNorm of the last dimension, one row per program."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_one_row",
    "family": "norm_row",
    "op": "rms_norm",
    "schema": 1,
    "saves": ("rstd: fp32 (M,)",),
    "grads": ("x",),
}


# --- forward ---
@triton.jit
def _rmsnorm_fwd(X, Y, R, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(R + row, rstd)
    tl.store(Y + row * N + cols, x * rstd, mask=cols < N)


def forward(x, eps=1e-6):
    M, N = x.shape
    y, rstd = torch.empty_like(x), torch.empty(M, device=x.device, dtype=torch.float32)
    _rmsnorm_fwd[(M,)](x, y, rstd, N, eps, BLOCK=triton.next_power_of_2(N))
    return y, (x, rstd)


# --- backward ---
@triton.jit
def _rmsnorm_bwd(DY, X, R, DX, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    rstd = tl.load(R + row)
    xhat = tl.load(X + row * N + cols, mask=cols < N, other=0.0).to(tl.float32) * rstd
    dy = tl.load(DY + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(DX + row * N + cols, rstd * (dy - xhat * (tl.sum(dy * xhat, 0) / N)), mask=cols < N)


def backward(saved, grad_y, needs=None):
    x, rstd = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    _rmsnorm_bwd[(M,)](grad_y.contiguous(), x, rstd, dx, N, BLOCK=triton.next_power_of_2(N))
    return dx


# --- check ---
SWEEP = [{"M": 3, "N": 20}]


def make_args(M, N, device="cpu", seed=0):
    return (torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).to(device),)


def reference(x, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
