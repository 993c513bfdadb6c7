"""Linear layer with many rows and a small weight: dweight = x^T @ dy is split along the rows into partial products."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_splitk_dw",
    "family": "matmul",
    "op": "linear",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "tensor-core", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rows_times_small(
    X, W, Y, M, N, K, x_m, x_k, w_k, w_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + m[:, None] * x_m + k[None, :] * x_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(W + k[:, None] * w_k + n[None, :] * w_n, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, w, acc)
    tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _times(x, w):
    (M, K), N = x.shape, w.shape[1]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BM, BN, BK = (max(16, min(most, triton.next_power_of_2(size))) for size, most in ((M, 128), (N, 64), (K, 32)))
    _rows_times_small[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        x, w, y, M, N, K, *x.stride(), *w.stride(), BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK
    )
    return y


def forward(x, weight):
    return _times(x, weight), (x, weight)


# --- backward ---
@triton.jit
def _dweight_split(
    X, DY, Parts, M, N, K, x_m, x_k, dy_m, dy_n, rows_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # The weight has too few tiles to fill a GPU; slices of the long row axis make up the number of programs.
    piece = tl.program_id(2).to(tl.int64)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.minimum((piece + 1) * rows_each, M)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(piece * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        x = tl.load(X + m[None, :] * x_m + k[:, None] * x_k, mask=(m[None, :] < last) & (k[:, None] < K), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < last) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, dy, acc)
    at = Parts + (piece * K + k[:, None]) * N + n[None, :]
    tl.store(at, acc, mask=(k[:, None] < K) & (n[None, :] < N))


@triton.jit
def _sum_pieces(Parts, DW, pieces, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        total += tl.load(Parts + piece * size + i, mask=i < size, other=0.0)
    tl.store(DW + i, total, mask=i < size)


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    (M, K), N = x.shape, weight.shape[1]
    dx = _times(grad_y, weight.T) if needs[0] else None
    if not needs[1]:
        return dx, None
    BK, BN, BM = (max(16, min(64, triton.next_power_of_2(size))) for size in (K, N, M))
    tiles = triton.cdiv(K, BK) * triton.cdiv(N, BN)
    # Enough pieces for about two waves on 132 multiprocessors, but at least two row tiles of work in each.
    pieces = max(1, min(264 // tiles, triton.cdiv(M, 2 * BM)))
    rows_each = triton.cdiv(triton.cdiv(M, pieces), BM) * BM
    pieces = triton.cdiv(M, rows_each)
    parts = torch.empty(pieces, K, N, device=x.device, dtype=torch.float32)
    _dweight_split[(triton.cdiv(K, BK), triton.cdiv(N, BN), pieces)](
        x, grad_y, parts, M, N, K, *x.stride(), *grad_y.stride(), rows_each, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK
    )
    dw = torch.empty_like(weight)
    _sum_pieces[(triton.cdiv(K * N, 256),)](parts, dw, pieces, K * N, BLOCK=256)
    return dx, dw


# --- check ---
SWEEP = ({"M": 320, "N": 16, "K": 24}, {"M": 333, "N": 21, "K": 19}, {"M": 256, "N": 32, "K": 16, "dtype": "float16"})


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) / K**0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)).contiguous() for t in (x, weight))


def reference(x, weight):
    return (x.float() @ weight.float()).to(x.dtype)
