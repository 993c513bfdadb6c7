"""SiLU activation, elementwise over a flat tensor."""

import torch
import triton
import triton.language as tl

META = {"slug": "silu_flat", "family": "activation", "op": "silu", "schema": 1, "grads": ("x",)}


# --- forward ---
@triton.jit
def _silu_fwd(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n)
    tl.store(Y + i, x * tl.sigmoid(x), mask=i < n)


def forward(x):
    y = torch.empty_like(x)
    _silu_fwd[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y, (x,)


# --- backward ---
@triton.jit
def _silu_bwd(DY, X, DX, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n)
    s = tl.sigmoid(x)
    tl.store(DX + i, tl.load(DY + i, mask=i < n) * (s * (1.0 + x * (1.0 - s))), mask=i < n)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    dx = torch.empty_like(x)
    _silu_bwd[(triton.cdiv(x.numel(), 256),)](grad_y.contiguous(), x, dx, x.numel(), BLOCK=256)
    return dx


# --- check ---
SWEEP = [{"n": 100}]


def make_args(n, device="cpu", seed=0):
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device),)


def reference(x):
    return torch.nn.functional.silu(x)
