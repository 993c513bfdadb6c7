"""Linear layer with a Toeplitz weight W[n, k] = w[n - k + K - 1]: tiles of dY^T X are sheared to sum their diagonals.

The (N, K) weight has N + K - 1 parameters and is never stored: its tiles are gathered from the vector while products
load them, in the forward and, transposed, in dX = dY W. dw[p] is the sum of G = dY^T X over the diagonal n - k = p -
K + 1. A program makes one square tile of G over a share of the rows; turning row r of the tile left by r puts every
diagonal into one or two columns, so that a column sum finishes them, and the 2 BLOCK - 1 sums are added to w's
gradient by atomics, where one add per element of G would queue up BLOCK deep at each parameter.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_toeplitz",
    "family": "matmul",
    "op": "matmul_toeplitz",
    "schema": 1,
    "techniques": ("split-k", "atomics", "broadcast-reduction", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "w"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _toeplitz_product(
    L, W, OUT, M, N, K, l_m, l_k, origin, step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT (M, N) = L (M, K) T (K, N) with T[k, n] = w[origin + step (n - k)]; step -1 is the transpose.
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(L + m * l_m + k[None, :].to(tl.int64) * l_k, mask=(m < M) & (k[None, :] < K), other=0.0)
        # A tile of T is a hundred or two neighbouring words, which stay in the first-level cache.
        toeplitz = tl.load(W + origin + step * (n - k[:, None]), mask=(k[:, None] < K) & (n < N), other=0.0)
        acc = tl.dot(left, toeplitz, acc)
    tl.store(OUT + m * N + n, acc, mask=(m < M) & (n < N))


def _side(size):
    return max(16, min(128, triton.next_power_of_2(size)))


def _product(left, w, N, origin, step):
    M, K = left.shape
    out = torch.empty(M, N, device=left.device, dtype=left.dtype)
    BLOCK_M, BLOCK_N = _side(M), min(64, _side(N))
    _toeplitz_product[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        left, w, out, M, N, K, *left.stride(), origin, step,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, w):
    w = w.contiguous()
    K = x.shape[1]
    return _product(x, w, w.numel() - K + 1, K - 1, 1), (x, w)


# --- backward ---
@triton.jit
def _toeplitz_dw(DY, X, DW, M, N, K, dy_m, dy_n, x_m, x_k, rows_each, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(2).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, M)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        dy = tl.load(
            DY + m[None, :] * dy_m + n[:, None].to(tl.int64) * dy_n,
            mask=(m[None, :] < last) & (n[:, None] < N),
            other=0.0,
        )
        x = tl.load(
            X + m[:, None] * x_m + k[None, :].to(tl.int64) * x_k, mask=(m[:, None] < last) & (k[None, :] < K), other=0.0
        )
        acc = tl.dot(dy, x, acc)
    # Column c of row r comes from column r - c mod BLOCK: what did not wrap lies on the diagonal +c of the tile, the
    # rest on the diagonal c - BLOCK. Elements outside are zeros, but their diagonals do not exist.
    row = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, BLOCK)
    turned = tl.gather(acc, (row - c[None, :]) & (BLOCK - 1), 1)
    plain = c[None, :] <= row
    at = DW + (tl.program_id(0) - tl.program_id(1)) * BLOCK + K - 1 + c
    place = (tl.program_id(0) - tl.program_id(1)) * BLOCK + K - 1 + c
    inside = (place >= 0) & (place < N + K - 1)
    tl.atomic_add(at, tl.sum(tl.where(plain, turned, 0.0), 0), mask=inside, sem="relaxed")
    place -= BLOCK
    inside = (place >= 0) & (place < N + K - 1)
    tl.atomic_add(at - BLOCK, tl.sum(tl.where(plain, 0.0, turned), 0), mask=inside, sem="relaxed")


def backward(saved, grad_y, needs=None):
    x, w = saved
    need_x, need_w = needs or (True, True)
    M, K = x.shape
    N = w.numel() - K + 1
    # dX = dY W: entry (n, k) of W is the entry (k, n) of the forward's T, so that steps along w turn round.
    dx = _product(grad_y, w, K, K - 1, -1) if need_x else None
    if not need_w:
        return dx, None
    dw = torch.zeros(w.numel(), device=w.device, dtype=torch.float32)
    BLOCK = min(64, _side(max(N, K)))
    tiles = triton.cdiv(N, BLOCK) * triton.cdiv(K, BLOCK)
    splits = max(1, min(triton.cdiv(M, 256), 528 // tiles))
    rows_each = triton.cdiv(triton.cdiv(M, splits), 64) * 64
    _toeplitz_dw[(triton.cdiv(N, BLOCK), triton.cdiv(K, BLOCK), triton.cdiv(M, rows_each))](
        grad_y, x, dw, M, N, K, *grad_y.stride(), *x.stride(), rows_each, BLOCK=BLOCK, BLOCK_M=64, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return dx, dw.to(w.dtype)


# --- check ---
SWEEP = (
    {"M": 48, "N": 64, "K": 32},
    {"M": 37, "N": 75, "K": 91, "dtype": "float16"},
    {"M": 300, "N": 20, "K": 45, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 1024, "K": 1024, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(M, K, generator=g), torch.randn(N + K - 1, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, w))


def reference(x, w):
    K = x.shape[1]
    # Row n of the weight is w[n : n + K] read backwards.
    return x @ w.unfold(0, K, 1).flip(1).T
