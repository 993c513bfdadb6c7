"""Tall product x W with many rows and a small weight: dW splits the rows over programs and adds fp32 partial tiles."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "matmul_splitk_dw",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "owner-grid"),
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
def _tall_dx(
    DY, W, DX, M, N, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DY.load([m, n]), W.load([k, n]).T, acc)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < K))


@triton.jit
def _splitk_dw(X, DY, Parts, M, N, K, rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Tile (k, n) of x^T dy over the rows of one split, which are whole steps, but for the last that ends with M.
    k, n = tl.program_id(0) * BLOCK_K, tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for m in range(split * rows_each, tl.minimum((split + 1) * rows_each, M), BLOCK_M):
        acc = tl.dot(X.load([m, k]).T, DY.load([m, n]), acc)
    rows, cols = k + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    at = (split.to(tl.int64) * K + rows[:, None]) * N + cols[None, :]
    tl.store(Parts + at, acc, mask=(rows[:, None] < K) & (cols[None, :] < N))


@triton.jit
def _splitk_add(Parts, DW, size, splits, BLOCK: tl.constexpr):
    # Adding in fixed order keeps dW bitwise reproducible, which atomics would not.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(Parts + at, mask=at < size, other=0.0)
        Parts += size
    tl.store(DW + at, total, mask=at < size)


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    step = 16 // matrix.element_size()
    width = matrix.shape[1]
    if matrix.stride(1) != 1 or matrix.stride(0) % step or matrix.stride(0) < width or matrix.storage_offset() % step:
        dense = matrix.new_empty(matrix.shape[0], triton.cdiv(width, step) * step)[:, :width]
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    x, weight = saved
    need_x, need_w = needs or (True, True)
    (M, K), N = x.shape, weight.shape[1]
    depth = 128 // x.element_size()
    dx = None
    if need_x:
        dx = torch.empty_like(x)
        BM, BK, BN = min(256, _up(M)), min(128, _up(K)), min(depth, _up(N))
        _tall_dx[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(weight, BK, BN), dx, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if not need_w:
        return dx, None
    BK, BN, BM = min(128, _up(K)), min(256, _up(N)), min(depth, _up(M))
    tiles_k, tiles_n = triton.cdiv(K, BK), triton.cdiv(N, BN)
    # One wave on 132 processors, but at least two steps for each split.
    splits = max(1, min(triton.cdiv(M, 2 * BM), 132 // (tiles_k * tiles_n)))
    rows_each = triton.cdiv(triton.cdiv(M, splits), BM) * BM
    splits = triton.cdiv(M, rows_each)
    parts = torch.empty(splits, K, N, device=x.device, dtype=torch.float32)
    _splitk_dw[(tiles_k, tiles_n, splits)](
        _tiles(x, BM, BK), _tiles(grad_y, BM, BN), parts, M, N, K, rows_each,
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
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
BENCH = ({"M": 131072, "N": 512, "K": 512, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, K, generator=g), torch.randn(K, N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    return x @ weight
