"""1.5-entmax: a sparse softmax whose gradient weighs by sqrt(y), dx = s * (dy - sum(s * dy) / sum(s)) with s = sqrt(y).

y = max(x / 2 - threshold, 0)^2 sums to one. The forward finds the support by halving the threshold's interval and takes
the threshold from mean and spread of the support's logits, a quadratic equation. Outside of the support s is zero and
so is dx, without any mask; the backward is a ratio of two row sums over the saved output.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "entmax15",
    "family": "softmax",
    "op": "entmax15",
    "schema": 1,
    "techniques": ("closed-form", "saved-output", "row-local", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _entmax_fwd(X, Y, N, x_row, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    z = 0.5 * tl.load(X + row * x_row + c, mask=c < N, other=-float("inf")).to(tl.float32)
    z = z - tl.max(z, 0)
    # Relative to the maximum the threshold lies between -1, where the sum is at least one, and 0, where it is zero.
    low = -1.0
    width = 1.0
    for _ in range(STEPS):
        width = 0.5 * width
        root = tl.maximum(z - (low + width), 0.0)
        low = tl.where(tl.sum(root * root, 0) >= 1.0, low + width, low)
    support = z > low
    size = tl.sum(support.to(tl.float32), 0)
    mean = tl.sum(tl.where(support, z, 0.0), 0) / size
    away = tl.where(support, z - mean, 0.0)
    # size * (mean - threshold)^2 + spread = 1
    threshold = mean - tl.sqrt((1.0 - tl.sum(away * away, 0)) / size)
    root = tl.where(support, tl.maximum(z - threshold, 0.0), 0.0)
    tl.store(Y + row * N + c, root * root, mask=c < N)


def _warps(BLOCK):
    return max(1, min(16, BLOCK // 512))


def forward(x):
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = triton.next_power_of_2(N)
    _entmax_fwd[(M,)](x, y, N, x.stride(0), STEPS=24, BLOCK=BLOCK, num_warps=_warps(BLOCK))
    return y, (y,)


# --- backward ---
@triton.jit
def _entmax_bwd(DY, Y, DX, N, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < N
    s = tl.sqrt(tl.load(Y + row * N + c, mask=inside, other=0.0).to(tl.float32))
    dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(s * dy, 0) / tl.sum(s, 0)
    tl.store(DX + row * N + c, s * (dy - centre), mask=inside)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    BLOCK = triton.next_power_of_2(N)
    _entmax_bwd[(M,)](grad_y, y, dx, N, grad_y.stride(0), grad_y.stride(1), BLOCK=BLOCK, num_warps=_warps(BLOCK))
    return dx


# --- check ---
SWEEP = ({"M": 8, "N": 64, "dtype": "float16"}, {"M": 7, "N": 101}, {"M": 5, "N": 32, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((2 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    z = x.float() / 2
    z = z - z.amax(-1, keepdim=True)
    ordered = z.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device)
    mean = ordered.cumsum(-1) / count
    spread = ordered.square().cumsum(-1) - count * mean.square()
    threshold = mean - ((1 - spread) / count).clamp(min=0).sqrt()
    size = (threshold <= ordered).sum(-1, keepdim=True)
    return (z - threshold.gather(-1, size - 1)).clamp(min=0).square().to(x.dtype)
