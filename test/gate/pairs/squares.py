"""Every element squared, of rows that may stand apart in memory."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="squares",
    family="elementwise",
    op="squares",
    schema=1,
    techniques=("row-per-program",),
    saves=(),
    grads=("x",),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _squares_fwd(X, Y, stride_x, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    x = tl.load(X + row * stride_x + c, mask=m)  # forward
    tl.store(Y + row * N + c, x * x, mask=m)


def forward(x):
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    _squares_fwd[(M,)](x, y, x.stride(0), N, BLOCK=triton.next_power_of_2(N))
    return y, (x,)


# --- backward ---
@triton.jit
def _squares_bwd(DY, X, DX, stride_m, stride_n, stride_x, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    g = tl.load(DY + row * stride_m + c * stride_n, mask=m)
    x = tl.load(X + row * stride_x + c, mask=m)  # backward
    tl.store(DX + row * N + c, 2 * x * g, mask=m)


def backward(saved, g):
    (x,) = saved
    M, N = x.shape
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    strides = (g.stride(0), g.stride(1), x.stride(0))
    _squares_bwd[(M,)](g, x, dx, *strides, N, BLOCK=triton.next_power_of_2(N))
    return dx


# --- check ---
SWEEP = (dict(M=3, N=20), dict(M=5, N=37))


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, N, generator=g).to(device, getattr(torch, dtype)),)


def reference(x):
    return x * x
