"""Cosine similarity of row pairs: rows stay in registers, norms are summed again, both gradients leave at once.

    c = <x, y> / (|x| |y|),    dx = dc (y / |y| - c x / |x|) / |x|,    dy = dc (x / |x| - c y / |y|) / |y|

Nothing is saved: the three sums come from the same loads that the gradients need.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cosine_similarity",
    "family": "reduction_stat",
    "op": "cosine_similarity",
    "schema": 1,
    "techniques": ("row-local", "one-launch", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "y"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _cosine_fwd(X, Y, Out, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    xy = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    xx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    yy = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        y = tl.load(Y + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        xy += x * y
        xx += x * x
        yy += y * y
    x_norm = tl.maximum(tl.sqrt(tl.sum(xx, 1)), eps)
    y_norm = tl.maximum(tl.sqrt(tl.sum(yy, 1)), eps)
    tl.store(Out + m, tl.sum(xy, 1) / x_norm / y_norm, mask=m < M)


def forward(x, y, eps=1e-8):
    """x, y (M, N), N up to about 16384 for the backward; norms below eps count as eps."""
    x, y = x.contiguous(), y.contiguous()
    M, N = x.shape
    out = torch.empty(M, device=x.device, dtype=x.dtype)
    BLOCK_N = min(512, triton.next_power_of_2(N))
    BLOCK_M = max(1, 1024 // BLOCK_N)
    _cosine_fwd[(triton.cdiv(M, BLOCK_M),)](x, y, out, M, N, eps, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4)
    return out, (x, y, eps)


# --- backward ---
@triton.jit
def _cosine_bwd(DOut, X, Y, DX, DY, M, N, eps, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    at = m[:, None] * N + n[None, :]
    ok = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(Y + at, mask=ok, other=0.0).to(tl.float32)
    x_length = tl.sqrt(tl.sum(x * x, 1))
    y_length = tl.sqrt(tl.sum(y * y, 1))
    x_inverse = 1.0 / tl.maximum(x_length, eps)
    y_inverse = 1.0 / tl.maximum(y_length, eps)
    dc = tl.load(DOut + m * stride, mask=m < M, other=0.0).to(tl.float32)
    cosine = tl.sum(x * y, 1) * x_inverse * y_inverse
    # A norm that eps replaces is a constant: its term disappears.
    x_pull = tl.where(x_length > eps, cosine, 0.0) * x_inverse
    y_pull = tl.where(y_length > eps, cosine, 0.0) * y_inverse
    dx = (dc * x_inverse)[:, None] * (y * y_inverse[:, None] - x * x_pull[:, None])
    dy = (dc * y_inverse)[:, None] * (x * x_inverse[:, None] - y * y_pull[:, None])
    tl.store(DX + at, dx, mask=ok)
    tl.store(DY + at, dy, mask=ok)


def backward(saved, grad_out, needs=None):
    x, y, eps = saved
    M, N = x.shape
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_M = max(1, 1024 // BLOCK_N)
    _cosine_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_out, x, y, dx, dy, M, N, eps, grad_out.stride(0),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=max(4, min(16, BLOCK_N // 512)),
    )  # fmt: skip
    return dx, dy


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 1037}, {"M": 21, "N": 72, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g)
    # Rows that resemble each other: the terms of the gradient then nearly cancel.
    y = x + torch.randn(M, N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, y))


def reference(x, y, eps=1e-8):
    return torch.nn.functional.cosine_similarity(x.float(), y.float(), -1, eps).to(x.dtype)
