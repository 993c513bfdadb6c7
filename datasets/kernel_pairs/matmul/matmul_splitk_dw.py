"""Tall product x W with many rows and a small weight: dW splits the rows over programs and adds fp32 partial tiles."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_splitk_dw",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tall_matmul(
    L, R, OUT, M, N, K, l_m, l_k, r_k, r_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT (M, N) = L (M, K) R (K, N) with a long M: the row tiles alone fill the device.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        left = tl.load(L + m[:, None] * l_m + kk[None, :] * l_k, mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0)
        right = tl.load(R + kk[:, None] * r_k + n[None, :] * r_n, mask=(kk[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _product(left, right):
    M, K = left.shape
    N = right.shape[1]
    out = torch.empty(M, N, device=left.device, dtype=right.dtype)
    _tall_matmul[(triton.cdiv(M, 128), triton.cdiv(N, 64))](
        left, right, out, M, N, K, left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight):
    return _product(x, weight), (x, weight)


# --- backward ---
@triton.jit
def _splitk_dw(
    X, DY, Parts, M, N, K, x_m, x_k, dy_m, dy_n, rows_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tile (k, n) of x^T dy over the rows of one split.
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2).to(tl.int64)
    first = split * rows_each
    last = tl.minimum(first + rows_each, M)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        xt = tl.load(X + k[:, None] * x_k + m[None, :] * x_m, mask=(k[:, None] < K) & (m[None, :] < last), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < last) & (n[None, :] < N), other=0.0)
        acc = tl.dot(xt, dy, acc)
    at = split * K * N + k[:, None] * N + n[None, :]
    tl.store(Parts + at, acc, mask=(k[:, None] < K) & (n[None, :] < N))


@triton.jit
def _splitk_add(Parts, DW, size, splits, BLOCK: tl.constexpr):
    # Adding in fixed order keeps dW bitwise reproducible, which atomics would not.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(Parts + at, mask=at < size, other=0.0)
        Parts += size
    tl.store(DW + at, total, mask=at < size)


def backward(saved, grad_y, needs=None):
    x, weight = saved
    need_x, need_w = needs or (True, True)
    M, K = x.shape
    N = weight.shape[1]
    dx = _product(grad_y, weight.t()) if need_x else None
    if not need_w:
        return dx, None
    # Two waves on 132 processors, but at least two row tiles of 64 for each split.
    tiles = triton.cdiv(K, 64) * triton.cdiv(N, 64)
    splits = max(1, min(triton.cdiv(M, 128), 264 // tiles))
    rows_each = triton.cdiv(triton.cdiv(M, splits), 64) * 64
    splits = triton.cdiv(M, rows_each)
    parts = torch.empty(splits, K, N, device=x.device, dtype=torch.float32)
    _splitk_dw[(triton.cdiv(K, 128), triton.cdiv(N, 128), splits)](
        x, grad_y, parts, M, N, K, x.stride(0), x.stride(1), grad_y.stride(0), grad_y.stride(1), rows_each,
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3,
    )  # fmt: skip
    dw = torch.empty(K, N, device=x.device, dtype=weight.dtype)
    _splitk_add[(triton.cdiv(K * N, 256),)](parts, dw, K * N, splits, BLOCK=256, num_warps=2)
    return dx, dw


# --- check ---
SWEEP = (
    {"M": 256, "N": 32, "K": 64},
    {"M": 407, "N": 67, "K": 18, "dtype": "float16"},
    {"M": 192, "N": 16, "K": 24, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 512, "K": 512, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, K, generator=g), torch.randn(K, N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    return x @ weight
