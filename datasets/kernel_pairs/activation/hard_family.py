"""Hardswish, hardsigmoid and hardtanh by a compile-time switch: three pieces whose borders belong to the flat sides.

All three are flat or linear outside of an open interval and change inside. The forward selects by the same comparisons
as the backward, not by clamps, so that the derivative at a border, which low precision hits often, is not left to
chance.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "hard_family",
    "family": "activation",
    "op": "hardswish",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}

# --- forward ---
HARDSWISH = tl.constexpr(0)
HARDSIGMOID = tl.constexpr(1)
HARDTANH = tl.constexpr(2)
KINDS = {"hardswish": HARDSWISH.value, "hardsigmoid": HARDSIGMOID.value, "hardtanh": HARDTANH.value}


@triton.jit
def _hard_fwd(X, Y, N, x_row, x_col, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    x = tl.load(X + row * x_row + c * x_col, mask=c < N, other=0.0).to(tl.float32)
    if KIND == HARDTANH:
        y = tl.where(x <= -1.0, -1.0, tl.where(x >= 1.0, 1.0, x))
    else:
        ramp = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, (x + 3.0) / 6.0))
        y = ramp if KIND == HARDSIGMOID else x * ramp
    tl.store(Y + row * N + c, y, mask=c < N)


def forward(x, kind="hardswish"):
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = max(64, min(2048, triton.next_power_of_2(N)))
    _hard_fwd[(M, triton.cdiv(N, BLOCK))](x, y, N, *x.stride(), KIND=KINDS[kind], BLOCK=BLOCK)
    return y, (x, kind)


# --- backward ---
@triton.jit
def _hard_bwd(DY, X, DX, N, dy_row, dy_col, x_row, x_col, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    x = tl.load(X + row * x_row + c * x_col, mask=c < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + c * dy_col, mask=c < N, other=0.0).to(tl.float32)
    if KIND == HARDTANH:
        dx = tl.where((x <= -1.0) | (x >= 1.0), 0.0, dy)
    elif KIND == HARDSIGMOID:
        dx = tl.where((x <= -3.0) | (x >= 3.0), 0.0, dy / 6.0)
    else:
        dx = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, dy, dy * (x / 3.0 + 0.5)))
    tl.store(DX + row * N + c, dx, mask=c < N)


def backward(saved, grad_y, needs=None):
    x, kind = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = max(64, min(2048, triton.next_power_of_2(N)))
    _hard_bwd[(M, triton.cdiv(N, BLOCK))](
        grad_y, x, dx, N, *grad_y.stride(), *x.stride(), KIND=KINDS[kind], BLOCK=BLOCK
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 8, "N": 128, "kind": "hardswish", "dtype": "float16"},
    {"M": 7, "N": 203, "kind": "hardsigmoid"},
    {"M": 5, "N": 99, "kind": "hardtanh"},
    {"M": 4, "N": 256, "kind": "hardswish", "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 8192, "kind": "hardswish", "dtype": "bfloat16"},)


def make_args(M, N, kind="hardswish", dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Quarters: borders are hit exactly, and often.
    x = (10 * torch.randn(M, N, generator=g)).round() / 4
    return x.to(device=device, dtype=getattr(torch, dtype)), kind


def reference(x, kind="hardswish"):
    return getattr(torch.nn.functional, kind)(x.float()).to(x.dtype)
