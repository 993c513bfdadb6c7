"""Products capped at five, with what normal inputs never reach."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="capped",
    family="activation",
    op="capped_product",
    schema=1,
    techniques=("elementwise",),
    saves=(),
    grads=("x", "a", "b"),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _capped_fwd(X, A, B, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = at < N
    x = tl.load(X + at, mask=m, other=0.0)
    capped = tl.minimum(tl.maximum(x, -5.0), 5.0)
    tl.store(Y + at, capped * tl.load(A + at, mask=m) + tl.load(B + at, mask=m), mask=m)


def forward(x, a, b):
    y = torch.empty_like(x)
    _capped_fwd[(triton.cdiv(x.numel(), 64),)](x, a, b, y, x.numel(), BLOCK=64)
    return y, (x, a)


# --- backward ---
@triton.jit
def _capped_bwd(DY, X, A, DX, DA, DB, stride, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = at < N
    g = tl.load(DY + at * stride, mask=m, other=0.0)
    x = tl.load(X + at, mask=m, other=0.0)
    a = tl.load(A + at, mask=m, other=0.0)
    inside = (x > -5.0) & (x < 5.0)
    tl.store(DX + at, tl.where(inside, g * a, 0.0), mask=m)
    tl.store(DA + at, g * tl.minimum(tl.maximum(x, -5.0), 5.0), mask=m)
    tl.store(DB + at, g, mask=m)


def backward(saved, grad_y, needs=None):
    x, a = saved
    dx, da, db = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    _capped_bwd[(triton.cdiv(x.numel(), 64),)](grad_y, x, a, dx, da, db, grad_y.stride(0), x.numel(), BLOCK=64)
    return dx, da, db


# --- check ---
SWEEP = (dict(N=400), dict(N=500))


def make_args(N, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(N, generator=g).to(device) for _ in range(3))


def reference(x, a, b):
    return x.clamp(-5, 5) * a + b
