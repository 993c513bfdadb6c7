"""Softmax of soft-capped logits, softmax(c tanh(x / c)): one tanh is recomputed, its square closes the chain rule.

The forward keeps x and the log-sum-exp of the capped row. The backward rebuilds t = tanh(x / c) and from it both the
probability exp(c t - lse) and the cap's slope (1 - t)(1 + t); capped logits are never stored. Rows are walked in
blocks, twice, since capped scores of long contexts outgrow one block.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "softcap_softmax",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "two-pass", "strided-cotangent"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _capped(X, c, N, cap):
    """tanh(x / cap) at columns c of a row, zero outside."""
    x = tl.load(X + c, mask=c < N, other=0.0).to(tl.float32)
    return libdevice.tanh(x / cap)


@triton.jit
def _softcap_fwd(X, Y, Lse, N, cap, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # The cap bounds logits from below as well: a start beneath it needs no infinities.
    top = tl.full((BLOCK,), -2.0, tl.float32) * cap
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        c = start + lane
        z = tl.where(c < N, cap * _capped(X + row * x_row, c, N, cap), -2.0 * cap)
        higher = tl.maximum(top, z)
        total = total * tl.exp(top - higher) + tl.where(c < N, tl.exp(z - higher), 0.0)
        top = higher
    peak = tl.max(top, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    tl.store(Lse + row, lse)
    for start in range(0, N, BLOCK):
        c = start + lane
        t = _capped(X + row * x_row, c, N, cap)
        tl.store(Y + row * N + c, tl.exp(cap * t - lse), mask=c < N)


def _block(N):
    return max(32, min(2048, triton.next_power_of_2(N) // 2))


def forward(x, cap):
    if cap <= 0:
        raise ValueError(f"the cap is {cap}; it must be positive")
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    lse = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = _block(N)
    _softcap_fwd[(M,)](x, y, lse, N, cap, x.stride(0), BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 256)))
    return y, (x, lse, cap)


# --- backward ---
@triton.jit
def _softcap_bwd(DY, X, Lse, DX, N, cap, x_row, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    lse = tl.load(Lse + row)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        c = start + lane
        dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=c < N, other=0.0).to(tl.float32)
        dot += dy * tl.exp(cap * _capped(X + row * x_row, c, N, cap) - lse)
    mean = tl.sum(dot, 0)
    for start in range(0, N, BLOCK):
        c = start + lane
        dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=c < N, other=0.0).to(tl.float32)
        t = _capped(X + row * x_row, c, N, cap)
        dz = tl.exp(cap * t - lse) * (dy - mean)
        tl.store(DX + row * N + c, dz * (1.0 - t) * (1.0 + t), mask=c < N)


def backward(saved, grad_y, needs=None):
    x, lse, cap = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = _block(N)
    _softcap_bwd[(M,)](
        grad_y, x, lse, dx, N, cap, x.stride(0), *grad_y.stride(), BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 256))
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 4, "N": 128, "cap": 5.0, "dtype": "float16"},
    {"M": 5, "N": 203, "cap": 2.0},
    {"M": 3, "N": 96, "cap": 30.0, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "cap": 30.0, "dtype": "bfloat16"},)


def make_args(M, N, cap, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)), cap


def reference(x, cap):
    return torch.softmax(cap * torch.tanh(x.float() / cap), -1).to(x.dtype)
