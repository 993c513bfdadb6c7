"""Row softmax."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="softmax",
    family="softmax",
    op="softmax",
    schema=1,
    techniques=("row-per-program",),
    saves=("y: input dtype (M, N)",),
    grads=("x",),
    dtypes=("float32", "float16"),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _softmax_fwd(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    x = tl.load(X + row * N + c, mask=m, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + row * N + c, e / tl.sum(e, 0), mask=m)


def forward(x):
    M, N = x.shape
    y = torch.empty_like(x)
    _softmax_fwd[(M,)](x, y, N, BLOCK=triton.next_power_of_2(N))
    return y, (y,)


# --- backward ---
@triton.jit
def _softmax_bwd(DY, Y, DX, stride_m, stride_n, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    g = tl.load(DY + row * stride_m + c * stride_n, mask=m, other=0.0).to(tl.float32)
    y = tl.load(Y + row * N + c, mask=m, other=0.0).to(tl.float32)
    tl.store(DX + row * N + c, y * (g - tl.sum(g * y, 0)), mask=m)


def backward(saved, grad_out):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    _softmax_bwd[(M,)](grad_out, y, dx, grad_out.stride(0), grad_out.stride(1), N, BLOCK=triton.next_power_of_2(N))
    return dx


# --- check ---
SWEEP = (dict(M=4, N=50), dict(M=20, N=90, dtype="float16"))


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, N, generator=g).to(device, getattr(torch, dtype)),)


def reference(x):
    return torch.softmax(x, -1)
