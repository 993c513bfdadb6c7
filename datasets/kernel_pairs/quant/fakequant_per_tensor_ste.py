"""Fake quantisation to n bits with one scale: the cotangent passes straight through wherever no clamp took effect."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "fakequant_per_tensor_ste",
    "family": "quant",
    "op": "fake_quantize",
    "schema": 1,
    "techniques": ("straight-through", "recompute", "partial-gradient"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _fakequant_fwd(X, Scale, Y, size, low, high, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    # The scale stays on the device: reading it here spares a synchronisation on the host.
    scale = tl.load(Scale).to(tl.float32)
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    level = libdevice.rint(x / scale)
    tl.store(Y + at, tl.minimum(tl.maximum(level, low), high) * scale, mask=ok)


def forward(x, scale, bits=8):
    x = x.contiguous()
    low, high = -float(1 << (bits - 1)), float((1 << (bits - 1)) - 1)
    y = torch.empty_like(x)
    _fakequant_fwd[(triton.cdiv(x.numel(), 2048),)](x, scale, y, x.numel(), low, high, BLOCK=2048, num_warps=8)
    return y, (x, scale, low, high)


# --- backward ---
@triton.jit
def _fakequant_bwd(DY, X, Scale, DX, size, low, high, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    scale = tl.load(Scale).to(tl.float32)
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load(DY + at, mask=ok, other=0.0)
    # The mask is that of the rounded level, computed as the forward did, so both agree at the last half step.
    level = libdevice.rint(x / scale)
    tl.store(DX + at, tl.where((level >= low) & (level <= high), dy, 0.0), mask=ok)


def backward(saved, grad_y, needs=None):
    x, scale, low, high = saved
    grad_y = grad_y.contiguous()
    dx = torch.empty_like(x)
    _fakequant_bwd[(triton.cdiv(x.numel(), 2048),)](grad_y, x, scale, dx, x.numel(), low, high, BLOCK=2048, num_warps=8)
    return dx


# --- check ---
SWEEP = (
    {"M": 16, "N": 128},
    {"M": 37, "N": 61, "bits": 4, "dtype": "float16"},
    {"M": 8, "N": 96, "bits": 4, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, bits=8, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g)
    # Two standard deviations fill the range, so that about one element in twenty is clamped.
    scale = torch.full((1,), 2.0 / (1 << (bits - 1)))
    return x.to(device=device, dtype=getattr(torch, dtype)), scale.to(device), bits


def _levels(x, scale, bits):
    level = torch.round(x.float() / scale)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return level.clamp(low, high) * scale, (level >= low) & (level <= high)


def reference(x, scale, bits=8):
    return _levels(x, scale, bits)[0].to(x.dtype)


def surrogate(x, scale, bits=8):
    y, inside = _levels(x.detach(), scale, bits)
    return torch.where(inside, x + (y.to(x.dtype) - x).detach(), y.to(x.dtype))
