"""Tanh and sigmoid by a compile-time switch: both derivatives are polynomials of the output, 1 - y^2 and y (1 - y).

y is all that is saved, and no exponential is evaluated again. Each lane reads its y and dy before it writes dx: a
caller that owns the cotangent may pass its buffer as dx and spare the allocation.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "tanh_sigmoid_from_output",
    "family": "activation",
    "op": "tanh",
    "schema": 1,
    "techniques": ("elementwise", "saved-output"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _squash_fwd(X, Y, size, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    # The library's tanh: a quotient of exponentials would have no digits left near zero.
    y = libdevice.tanh(x) if TANH else tl.sigmoid(x)
    tl.store(Y + i, y, mask=i < size)


def forward(x, kind="tanh"):
    if kind not in ("tanh", "sigmoid"):
        raise ValueError(f"{kind!r} is neither 'tanh' nor 'sigmoid'")
    x = x.contiguous()
    y = torch.empty_like(x)
    _squash_fwd[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), TANH=kind == "tanh", BLOCK=1024)
    return y, (y, kind)


# --- backward ---
@triton.jit
def _squash_bwd(DY, Y, DX, size, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(DY + i, mask=i < size, other=0.0).to(tl.float32)
    y = tl.load(Y + i, mask=i < size, other=0.0).to(tl.float32)
    # (1 - y)(1 + y) keeps more digits than 1 - y * y where y is near one.
    slope = (1.0 - y) * (1.0 + y) if TANH else y * (1.0 - y)
    tl.store(DX + i, dy * slope, mask=i < size)


def backward(saved, grad_y, needs=None):
    y, kind = saved
    dx = torch.empty_like(y)
    _squash_bwd[(triton.cdiv(y.numel(), 1024),)](grad_y.contiguous(), y, dx, y.numel(), TANH=kind == "tanh", BLOCK=1024)
    return dx


# --- check ---
SWEEP = (
    {"M": 16, "N": 128, "kind": "tanh", "dtype": "float16"},
    {"M": 13, "N": 101, "kind": "sigmoid"},
    {"M": 4, "N": 256, "kind": "tanh", "dtype": "bfloat16"},
)
BENCH = (
    {"M": 16384, "N": 4096, "kind": "tanh", "dtype": "bfloat16"},
    {"M": 16384, "N": 4096, "kind": "sigmoid", "dtype": "bfloat16"},
)


def make_args(M, N, kind="tanh", dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)), kind


def reference(x, kind="tanh"):
    return (torch.tanh if kind == "tanh" else torch.sigmoid)(x.float()).to(x.dtype)
