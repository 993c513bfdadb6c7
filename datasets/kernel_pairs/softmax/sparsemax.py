"""Sparsemax, the projection of a row onto the simplex: the gradient is centred over the support, which y > 0 tells.

The forward halves the interval of the threshold until it fixes the support, then takes the threshold from the support
in closed form: (sum of its logits - 1) / its size. The backward needs no threshold and no x: on the support dx is dy
minus the mean of dy there, elsewhere zero.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sparsemax",
    "family": "softmax",
    "op": "sparsemax",
    "schema": 1,
    "techniques": ("closed-form", "saved-output", "multi-row-tile", "row-local", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sparsemax_fwd(X, Y, M, N, x_row, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = tl.arange(0, BLOCK)[None, :]
    x = tl.load(X + m * x_row + n, mask=(m < M) & (n < N), other=0.0).to(tl.float32)
    x = tl.where(n < N, x - tl.max(tl.where(n < N, x, -float("inf")), 1, keep_dims=True), -float("inf"))
    # Relative to the maximum the threshold lies between -1, where the sum is at least one, and 0, where it is zero.
    low = tl.full((ROWS, 1), -1.0, tl.float32)
    width = 1.0
    for _ in range(STEPS):
        width = 0.5 * width
        enough = tl.sum(tl.maximum(x - (low + width), 0.0), 1, keep_dims=True) >= 1.0
        low = tl.where(enough, low + width, low)
    support = x > low
    size = tl.sum(support.to(tl.float32), 1, keep_dims=True)
    threshold = (tl.sum(tl.where(support, x, 0.0), 1, keep_dims=True) - 1.0) / size
    y = tl.where(support, tl.maximum(x - threshold, 0.0), 0.0)
    tl.store(Y + m * N + n, y, mask=(m < M) & (n < N))


def _tile(M, N):
    BLOCK = triton.next_power_of_2(N)
    return max(1, min(triton.next_power_of_2(M), 2048 // BLOCK)), BLOCK


def forward(x):
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    ROWS, BLOCK = _tile(M, N)
    # Every step gives a bit of the threshold; fp32 has 24 of them.
    _sparsemax_fwd[(triton.cdiv(M, ROWS),)](
        x, y, M, N, x.stride(0), STEPS=24, ROWS=ROWS, BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 1024))
    )
    return y, (y,)


# --- backward ---
@triton.jit
def _sparsemax_bwd(DY, Y, DX, M, N, dy_row, dy_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = tl.arange(0, BLOCK)[None, :]
    mask = (m < M) & (n < N)
    support = tl.load(Y + m * N + n, mask=mask, other=0.0) > 0
    # Only the support is read: most of dy is not touched where rows are sparse.
    dy = tl.load(DY + m * dy_row + n.to(tl.int64) * dy_col, mask=support, other=0.0).to(tl.float32)
    size = tl.maximum(tl.sum(support.to(tl.float32), 1, keep_dims=True), 1.0)
    mean = tl.sum(dy, 1, keep_dims=True) / size
    tl.store(DX + m * N + n, tl.where(support, dy - mean, 0.0), mask=mask)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    ROWS, BLOCK = _tile(M, N)
    _sparsemax_bwd[(triton.cdiv(M, ROWS),)](
        grad_y, y, dx, M, N, *grad_y.stride(), ROWS=ROWS, BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 1024))
    )
    return dx


# --- check ---
SWEEP = ({"M": 16, "N": 64, "dtype": "float16"}, {"M": 21, "N": 101}, {"M": 9, "N": 32, "dtype": "bfloat16"})
BENCH = ({"M": 65536, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g).to(getattr(torch, dtype))
    # Thresholds of 16-bit logits often hit a logit, and rounding would decide whether it belongs to the support: it is
    # moved below. A few of the largest logits settle the threshold.
    at_edge = (x.float() - _threshold(x.float().topk(min(N, 64)).values)).abs() < 1e-4
    return (torch.where(at_edge, x - 1, x).to(device),)


def _threshold(descending):
    count = torch.arange(1, descending.shape[-1] + 1, device=descending.device)
    excess = descending.cumsum(-1) - 1
    size = (count * descending > excess).sum(-1, keepdim=True)
    return excess.gather(-1, size - 1) / size


def reference(x):
    xf = x.float()
    return (xf - _threshold(xf.sort(-1, descending=True).values)).clamp(min=0).to(x.dtype)
