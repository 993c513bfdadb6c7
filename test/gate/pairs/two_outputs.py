"""s = x + y and p = x * y, two differentiable outputs of two inputs of one shape."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="two_outputs",
    family="elementwise",
    op="sum_and_product",
    schema=1,
    techniques=("flat",),
    saves=(),
    grads=("x", "y"),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _both_fwd(X, Y, S, P, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    x, y = tl.load(X + i, mask=m, other=0.0), tl.load(Y + i, mask=m, other=0.0)
    tl.store(S + i, x + y, mask=m)
    tl.store(P + i, x * y, mask=m)


def forward(x, y):
    s, p = torch.empty_like(x), torch.empty_like(x)
    _both_fwd[(triton.cdiv(x.numel(), 64),)](x, y, s, p, x.numel(), BLOCK=64)
    return (s, p), (x, y)


# --- backward ---
@triton.jit
def _both_bwd(DS, DP, X, Y, DX, DY, n, HAS_S: tl.constexpr, HAS_P: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    dx = tl.zeros((BLOCK,), tl.float32)
    dy = tl.zeros((BLOCK,), tl.float32)
    if HAS_S:
        ds = tl.load(DS + i, mask=m, other=0.0)
        dx += ds
        dy += ds
    if HAS_P:
        dp = tl.load(DP + i, mask=m, other=0.0)
        dx += dp * tl.load(Y + i, mask=m, other=0.0)
        dy += dp * tl.load(X + i, mask=m, other=0.0)
    tl.store(DX + i, dx, mask=m)
    tl.store(DY + i, dy, mask=m)


def backward(saved, grad_s, grad_p):
    x, y = saved
    ds = None if grad_s is None else grad_s.contiguous()
    dp = None if grad_p is None else grad_p.contiguous()
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    grid = (triton.cdiv(x.numel(), 64),)
    _both_bwd[grid](ds, dp, x, y, dx, dy, x.numel(), HAS_S=ds is not None, HAS_P=dp is not None, BLOCK=64)
    return dx, dy


# --- check ---
SWEEP = (dict(n=100),)


def make_args(n, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g).to(device), torch.randn(n, generator=g).to(device)


def reference(x, y):
    return x + y, x * y
