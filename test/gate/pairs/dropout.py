"""Dropout by a seed, of which `make_args` has one: most calls that a user writes down have."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="dropout",
    family="dropout_rng",
    op="dropout",
    schema=1,
    techniques=(),
    saves=(),
    grads=("x",),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _dropout(X, Y, p, seed, n, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.rand(seed, i) >= p
    x = tl.load(X + i * step, mask=i < n, other=0.0)
    tl.store(Y + i, tl.where(kept, x / (1 - p), 0.0), mask=i < n)


def forward(x, p, seed):
    y = torch.empty_like(x)
    _dropout[(triton.cdiv(x.numel(), 64),)](x, y, p, seed, x.numel(), x.stride(0), BLOCK=64)
    return y, (p, seed)


# --- backward ---
def by_kernel(g, p, seed):
    dx = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    _dropout[(triton.cdiv(g.numel(), 64),)](g, dx, p, seed, g.numel(), g.stride(0), BLOCK=64)
    return dx


def backward(saved, g):
    p, seed = saved
    return by_kernel(g, p, seed)


# --- check ---
SWEEP = (dict(n=100), dict(n=130))


def make_args(n, device="cpu", seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device), 0.4, 42
