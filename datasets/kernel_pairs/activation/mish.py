"""Mish, x * tanh(softplus(x)): tanh of a logarithm is a ratio of polynomials, one exponential serves y and dx.

With w = exp(x), tanh(log(1 + w)) = (w^2 + 2w) / (w^2 + 2w + 2). Both are written in t = exp(-|x|), by dividing through
w^2 where x is positive, so that nothing overflows; the derivative is a product without the cancellation of 1 - tanh^2.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mish",
    "family": "activation",
    "op": "mish",
    "schema": 1,
    "techniques": ("elementwise", "recompute"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _mish_terms(x):
    """exp(-|x|), whether x is positive, tanh(softplus(x)) and the denominator of that."""
    t = tl.exp(-tl.abs(x))
    positive = x >= 0
    below = tl.where(positive, 1.0 + 2.0 * t + 2.0 * t * t, t * t + 2.0 * t + 2.0)
    gate = tl.where(positive, 1.0 + 2.0 * t, t * t + 2.0 * t) / below
    return t, positive, gate, below


@triton.jit
def _mish_fwd(X, Y, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)
    _, _, gate, _ = _mish_terms(x)
    tl.store(Y + i, x * gate, mask=i < numel)


def forward(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    _mish_fwd[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y, (x,)


# --- backward ---
@triton.jit
def _mish_bwd(DY, X, DX, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)
    dy = tl.load(DY + i, mask=i < numel, other=0.0).to(tl.float32)
    t, positive, gate, below = _mish_terms(x)
    # (1 - gate^2) * sigmoid(x), with the common factors of both cancelled.
    slope = 4.0 * (1.0 + t) * t * tl.where(positive, t, 1.0) / (below * below)
    tl.store(DX + i, dy * (gate + x * slope), mask=i < numel)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    dx = torch.empty_like(x)
    _mish_bwd[(triton.cdiv(x.numel(), 2048),)](grad_y.contiguous(), x, dx, x.numel(), BLOCK=2048)
    return dx


# --- check ---
SWEEP = ({"M": 16, "N": 128, "dtype": "float16"}, {"M": 13, "N": 101}, {"M": 4, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((4 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.nn.functional.mish(x.float()).to(x.dtype)
