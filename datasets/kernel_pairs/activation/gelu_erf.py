"""Exact GELU, x * Phi(x): the input alone is saved and the derivative Phi(x) + x * phi(x) is evaluated in fp32."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gelu_erf",
    "family": "activation",
    "op": "gelu",
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
def _gelu_fwd(X, Y, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)
    phi = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
    tl.store(Y + i, x * phi, mask=i < numel)


def forward(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    _gelu_fwd[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y, (x,)


# --- backward ---
@triton.jit
def _gelu_bwd(DY, X, DX, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)
    dy = tl.load(DY + i, mask=i < numel, other=0.0).to(tl.float32)
    cdf = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
    pdf = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    tl.store(DX + i, dy * (cdf + x * pdf), mask=i < numel)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    dx = torch.empty_like(x)
    _gelu_bwd[(triton.cdiv(x.numel(), 1024),)](grad_y.contiguous(), x, dx, x.numel(), BLOCK=1024)
    return dx


# --- check ---
SWEEP = ({"M": 16, "N": 128}, {"M": 13, "N": 101, "dtype": "float16"}, {"M": 4, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((2 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.nn.functional.gelu(x.float()).to(x.dtype)
