"""Softmax of the last dimension, one row per program; the output is saved."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_one_row",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "saves": ("y: dtype of x (M, N)",),
    "grads": ("x",),
}


# --- forward ---
@triton.jit
def _softmax_fwd(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, 0))
    tl.store(Y + row * N + cols, numerator / tl.sum(numerator, 0), mask=cols < N)


def forward(x):
    M, N = x.shape
    y = torch.empty_like(x)
    _softmax_fwd[(M,)](x, y, N, BLOCK=triton.next_power_of_2(N))
    return y, (y,)


# --- backward ---
@triton.jit
def _softmax_bwd(DY, Y, DX, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    y = tl.load(Y + row * N + cols, mask=cols < N, other=0.0)
    dy = tl.load(DY + row * N + cols, mask=cols < N, other=0.0)
    tl.store(DX + row * N + cols, y * (dy - tl.sum(dy * y, 0)), mask=cols < N)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    _softmax_bwd[(M,)](grad_y.contiguous(), y, dx, N, BLOCK=triton.next_power_of_2(N))
    return dx


# --- check ---
SWEEP = [{"M": 3, "N": 20}]


def make_args(M, N, device="cpu", seed=0):
    return (torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).to(device),)


def reference(x):
    return torch.softmax(x, -1)
