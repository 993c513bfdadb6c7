"""Softmax along the middle axis of (B, K, N): the reduction runs down strided rows, memory is read across columns.

A program owns a strip of columns and walks down it twice. Every element of the tile keeps its own running sum, and the
rows of the tile are folded once, after the walk: the loop holds no reduction, and no partial sum leaves the program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_dim0",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("column-owner", "two-pass", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, K, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _column_softmax_fwd(X, Y, K, N, x_b, x_k, x_n, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    lane = tl.arange(0, BLOCK_K)[:, None]
    source = X + batch * x_b + n.to(tl.int64) * x_n
    top = tl.full((BLOCK_K, BLOCK_N), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + lane).to(tl.int64)
        x = tl.load(source + k * x_k, mask=(k < K) & (n < N), other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A place that has seen nothing yet holds -inf; its correction would be inf - inf.
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - anchor) + tl.exp(x - anchor)
        top = higher
    peak = tl.max(top, 0, keep_dims=True)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    norm = 1.0 / tl.sum(total * tl.exp(top - peak), 0, keep_dims=True)
    for start in range(0, K, BLOCK_K):
        k = (start + lane).to(tl.int64)
        mask = (k < K) & (n < N)
        x = tl.load(source + k * x_k, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(Y + (batch * K + k) * N + n, tl.exp(x - peak) * norm, mask=mask)


def _tile(K):
    """Rows and columns of a tile: 64 columns are 128 bytes of bf16, a full line of memory."""
    return min(32, triton.next_power_of_2(K)), 64


def forward(x):
    B, K, N = x.shape
    y = torch.empty(B, K, N, device=x.device, dtype=x.dtype)
    BLOCK_K, BLOCK_N = _tile(K)
    _column_softmax_fwd[(triton.cdiv(N, BLOCK_N), B)](x, y, K, N, *x.stride(), BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N)
    return y, (y,)


# --- backward ---
@triton.jit
def _column_softmax_bwd(DY, Y, DX, K, N, dy_b, dy_k, dy_n, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    lane = tl.arange(0, BLOCK_K)[:, None]
    grad = DY + batch * dy_b + n.to(tl.int64) * dy_n
    dot = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    # Copies run five tiles ahead in both walks; few strips are under way at once, which L2 holds between the walks.
    for start in tl.range(0, K, BLOCK_K, num_stages=6):
        k = (start + lane).to(tl.int64)
        mask = (k < K) & (n < N)
        y = tl.load(Y + (batch * K + k) * N + n, mask=mask, other=0.0).to(tl.float32)
        dot += y * tl.load(grad + k * dy_k, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(dot, 0, keep_dims=True)
    # Upwards, from the rows that were read last and are still in cache.
    for i in tl.range(tl.cdiv(K, BLOCK_K), num_stages=6):
        k = ((tl.cdiv(K, BLOCK_K) - 1 - i) * BLOCK_K + lane).to(tl.int64)
        mask = (k < K) & (n < N)
        at = (batch * K + k) * N + n
        y = tl.load(Y + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad + k * dy_k, mask=mask, other=0.0).to(tl.float32)
        tl.store(DX + at, y * (dy - mean), mask=mask)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    B, K, N = y.shape
    dx = torch.empty_like(y)
    # 64 columns are a line of bf16; fp32 takes half of them.
    BLOCK_K, BLOCK_N = min(128, triton.next_power_of_2(K)), 128 // y.element_size()
    _column_softmax_bwd[(triton.cdiv(N, BLOCK_N), B)](
        grad_y, y, dx, K, N, *grad_y.stride(), BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, num_warps=8
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "K": 64, "N": 128, "dtype": "float16"},
    {"B": 2, "K": 45, "N": 83},
    {"B": 2, "K": 40, "N": 64, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "K": 1024, "N": 4096, "dtype": "bfloat16"},)


def make_args(B, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((2 * torch.randn(B, K, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.softmax(x.float(), 1).to(x.dtype)
