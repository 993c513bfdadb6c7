"""Softmax of x / t with a learned temperature for each row: dx, and dt = -sum(dx * x) / t out of the same row.

dt is a small difference of large products where dx sums to zero, so that the probabilities are not read back from a
rounded y but rebuilt in fp32 from x and the saved log-sum-exp, and x enters as its distance from the row's mean under
p.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_temperature",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("row-local", "saved-lse", "recompute", "strided-cotangent"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("x", "temperature"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tempered_fwd(X, Temp, Y, Lse, N, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inverse = 1.0 / tl.load(Temp + row).to(tl.float32)
    z = tl.load(X + row * x_row + c, mask=c < N, other=-float("inf")).to(tl.float32) * inverse
    top = tl.max(z, 0)
    lse = top + tl.log(tl.sum(tl.exp(z - top), 0))
    tl.store(Lse + row, lse)
    tl.store(Y + row * N + c, tl.exp(z - lse), mask=c < N)


def _warps(BLOCK):
    return max(1, min(16, BLOCK // 512))


def forward(x, temperature):
    x = x if x.stride(1) == 1 else x.contiguous()
    temperature = temperature.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    lse = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _tempered_fwd[(M,)](x, temperature, y, lse, N, x.stride(0), BLOCK=BLOCK, num_warps=_warps(BLOCK))
    return y, (x, temperature, lse)


# --- backward ---
@triton.jit
def _tempered_bwd(DY, X, Temp, Lse, DX, DTemp, N, x_row, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < N
    inverse = 1.0 / tl.load(Temp + row).to(tl.float32)
    x = tl.load(X + row * x_row + c, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=inside, other=0.0).to(tl.float32)
    p = tl.where(inside, tl.exp(x * inverse - tl.load(Lse + row)), 0.0)
    dx = p * (dy - tl.sum(p * dy, 0)) * inverse
    tl.store(DX + row * N + c, dx, mask=inside)
    # dx sums to zero: any constant may be taken off x, and the mean leaves the least to cancel.
    tl.store(DTemp + row, -tl.sum(dx * (x - tl.sum(p * x, 0)), 0) * inverse)


def backward(saved, grad_y, needs=None):
    x, temperature, lse = saved
    M, N = x.shape
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    d_temperature = torch.empty_like(temperature)
    BLOCK = triton.next_power_of_2(N)
    _tempered_bwd[(M,)](
        grad_y, x, temperature, lse, dx, d_temperature, N, x.stride(0), grad_y.stride(0), grad_y.stride(1),
        BLOCK=BLOCK, num_warps=_warps(BLOCK),
    )  # fmt: skip
    return dx, d_temperature


# --- check ---
SWEEP = ({"M": 8, "N": 64, "dtype": "float16"}, {"M": 7, "N": 101}, {"M": 5, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 8192, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, temperature = 2 * torch.randn(M, N, generator=g), 0.5 + torch.rand(M, generator=g)
    return x.to(device=device, dtype=getattr(torch, dtype)), temperature.to(device)


def reference(x, temperature):
    return torch.softmax(x.float() / temperature[:, None], -1).to(x.dtype)
