"""y = x + a * b: the gradient of x is the cotangent itself, so that no kernel runs where nothing else is needed."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="skip_connection",
    family="elementwise",
    op="multiply_add",
    schema=1,
    techniques=("flat",),
    saves=(),
    grads=("x", "a"),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _skip_fwd(X, A, B, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    product = tl.load(A + i, mask=m, other=0.0) * tl.load(B + i, mask=m, other=0.0)
    tl.store(Y + i, tl.load(X + i, mask=m, other=0.0) + product, mask=m)


def forward(x, a, b):
    y = torch.empty_like(x)
    _skip_fwd[(triton.cdiv(x.numel(), 64),)](x, a, b, y, x.numel(), BLOCK=64)
    return y, (b,)


# --- backward ---
@triton.jit
def _skip_bwd(DY, B, DA, n, dy_n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    da = tl.load(DY + i * dy_n, mask=m, other=0.0) * tl.load(B + i, mask=m, other=0.0)
    tl.store(DA + i, da, mask=m)


def backward(saved, grad_y, needs=None):
    (b,) = saved
    _, need_a = needs or (True, True)
    da = None
    if need_a:
        da = torch.empty_like(b)
        _skip_bwd[(triton.cdiv(b.numel(), 64),)](grad_y, b, da, b.numel(), grad_y.stride(0), BLOCK=64)
    return grad_y, da


# --- check ---
SWEEP = (dict(n=100),)


def make_args(n, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, generator=g).to(device) for _ in range(3))


def reference(x, a, b):
    return x + a * b
