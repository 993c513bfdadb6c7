"""RMS normalisation over rows with a weight."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="rmsnorm",
    family="norms",
    op="rmsnorm",
    schema=1,
    techniques=("row-per-program", "partial-sums"),
    saves=("rstd: float32 (M,)",),
    grads=("x", "w"),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _rmsnorm_fwd(X, W, Y, RSTD, N, EPS, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    x = tl.load(X + row * N + c, mask=m, other=0.0).to(tl.float32)
    w = tl.load(W + c, mask=m, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / N + EPS)
    tl.store(RSTD + row, rstd)
    tl.store(Y + row * N + c, x * rstd * w, mask=m)


def forward(x, w):
    M, N = x.shape
    y = torch.empty_like(x)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    _rmsnorm_fwd[(M,)](x, w, y, rstd, N, 1e-6, BLOCK=triton.next_power_of_2(N))
    return y, (x, w, rstd)


# --- backward ---
@triton.jit
def _rmsnorm_bwd(DY, X, W, RSTD, DX, DW, stride_m, stride_n, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    g = tl.load(DY + row * stride_m + c * stride_n, mask=m, other=0.0).to(tl.float32)
    w = tl.load(W + c, mask=m, other=0.0).to(tl.float32)
    rstd = tl.load(RSTD + row)
    x = tl.load(X + row * N + c, mask=m, other=0.0).to(tl.float32) * rstd
    tl.store(DX + row * N + c, (g * w - x * tl.sum(g * w * x, 0) / N) * rstd, mask=m)
    tl.store(DW + row * N + c, g * x, mask=m)


def by_kernel(saved, g):
    x, w, rstd = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    dw = torch.empty((M, N), dtype=torch.float32, device=x.device)
    _rmsnorm_bwd[(M,)](g, x, w, rstd, dx, dw, g.stride(0), g.stride(1), N, BLOCK=triton.next_power_of_2(N))
    return dx, dw.sum(0).to(w.dtype)


def backward(saved, g):
    return by_kernel(saved, g)


# --- check ---
SWEEP = (dict(M=3, N=20), dict(M=5, N=37))


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(M, N, generator=g), torch.randn(N, generator=g)
    return x.to(device, getattr(torch, dtype)), w.to(device, getattr(torch, dtype))


def reference(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
