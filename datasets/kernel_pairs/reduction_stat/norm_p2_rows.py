"""Euclidean norm of each row: dx = dy x / |x|, and zero where the row is zero and the norm has no derivative."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "norm_p2_rows",
    "family": "reduction_stat",
    "op": "vector_norm",
    "schema": 1,
    "techniques": ("saved-statistics", "multi-row-tile", "strided-cotangent"),
    "saves": ("norm: fp32 (M)",),
    "grads": ("x",),
    "gradient": "custom",
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _norm_fwd(X, Y, Norm, N, BLOCK_N: tl.constexpr):
    # Squares are taken of x / max |x|, the maximum known so far: no overflow, and tiny rows do not vanish.
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    square = 0.0
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        x = tl.abs(tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32))
        larger = tl.maximum(largest, tl.max(x, 0))
        unit = tl.where(larger > 0.0, larger, 1.0)
        ratio = x / unit
        square = square * (largest / unit) * (largest / unit) + tl.sum(ratio * ratio, 0)
        largest = larger
    norm = largest * tl.sqrt(square)
    tl.store(Y + row, norm)
    tl.store(Norm + row, norm)


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    # Dividing by a norm rounded to bf16 would scale the whole gradient.
    norm = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK_N = min(4096, triton.next_power_of_2(N))
    _norm_fwd[(M,)](x, y, norm, N, BLOCK_N=BLOCK_N, num_warps=max(1, min(8, BLOCK_N // 512)))
    return y, (x, norm)


# --- backward ---
@triton.jit
def _norm_bwd(DY, X, Norm, DX, M, N, dy_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dy = tl.load(DY + m * dy_m, mask=m < M, other=0.0).to(tl.float32)
    norm = tl.load(Norm + m, mask=m < M, other=0.0)
    some = norm > 0.0
    # x / norm first: it is at most one, where dy / norm could overflow.
    inverse = tl.where(some, norm, 1.0)
    ok = (m < M) & (n < N)
    x = tl.load(X + m * N + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(DX + m * N + n, tl.where(some, dy * (x / inverse), 0.0), mask=ok)


def backward(saved, grad_y, needs=None):
    x, norm = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_N = min(1024, triton.next_power_of_2(N))
    BLOCK_M = max(1, 2048 // BLOCK_N)
    _norm_bwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        grad_y, x, norm, dx, M, N, grad_y.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 5003}, {"M": 21, "N": 72, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g)
    # The second row is zero.
    x[1:2] = 0.0
    return (x.to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.linalg.vector_norm(x.float(), dim=-1).to(x.dtype)


def surrogate(x):
    return torch.linalg.vector_norm(x, dim=-1)
