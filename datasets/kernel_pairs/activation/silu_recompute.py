"""SiLU of a tensor of any shape: the input alone is kept, and its sigmoid s is computed again for s + x * s * (1 - s).

Recomputing costs one exponential per element of a pass that waits for memory anyway; saving s would add a tensor as
large as x to the peak and to the traffic of both passes.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "silu_recompute",
    "family": "activation",
    "op": "silu",
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
def _silu_fwd(X, Y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + at, x * tl.sigmoid(x), mask=ok)


def forward(x):
    x = x.contiguous()
    size = x.numel()
    y = torch.empty_like(x)
    # Large tensors: sixteen elements per lane, in loads of sixteen bytes. Small ones: programs for every processor.
    BLOCK = 2048 if size >= 1 << 18 else 256
    _silu_fwd[(triton.cdiv(size, BLOCK),)](x, y, size, BLOCK=BLOCK, num_warps=4)
    return y, (x, BLOCK)


# --- backward ---
@triton.jit
def _silu_bwd(DY, X, DX, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load(DY + at, mask=ok, other=0.0).to(tl.float32)
    s = tl.sigmoid(x)
    tl.store(DX + at, dy * (s + x * s * (1.0 - s)), mask=ok)


def backward(saved, grad_y, needs=None):
    x, BLOCK = saved
    dx = torch.empty_like(x)
    # One flat pass for every rank: a cotangent that is not dense is laid out like x first.
    _silu_bwd[(triton.cdiv(x.numel(), BLOCK),)](grad_y.contiguous(), x, dx, x.numel(), BLOCK=BLOCK, num_warps=4)
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "T": 8, "N": 64, "dtype": "float16"},
    {"B": 3, "T": 7, "N": 37},
    {"B": 1, "T": 6, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "T": 4096, "N": 4096, "dtype": "bfloat16"},)


def make_args(B, T, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((3 * torch.randn(B, T, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.nn.functional.silu(x.float()).to(x.dtype)
