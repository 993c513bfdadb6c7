"""Covariance of columns, centred X^T X / M: a product with G + G^T, centred as it is loaded, is the whole gradient.

    C = Xc^T Xc / M,  Xc = X - mean,    dX = Xc (G + G^T) / M

The mean's own derivative would take the column means off dX; they are zero, because those of Xc are. Neither Xc nor
G + G^T is ever stored.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "correlation_matrix_cols",
    "family": "reduction_stat",
    "op": "covariance",
    "schema": 1,
    "techniques": ("prologue-fusion", "saved-statistics", "split-k", "strided-cotangent"),
    "saves": ("mean: fp32 (N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _column_sums(X, Parts, M, N, rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    part = tl.program_id(1).to(tl.int64)
    last = tl.minimum((part + 1) * rows_each, M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(part * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)[:, None]
        total += tl.load(X + m * N + n, mask=(m < last) & (n < N), other=0.0).to(tl.float32)
    tl.store(Parts + part * N + n, tl.sum(total, 0)[None, :] / M, mask=n < N)


@triton.jit
def _covariance_parts(
    X, Mean, Parts, M, N, rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    part = tl.program_id(2).to(tl.int64)
    last = tl.minimum((part + 1) * rows_each, M)
    mean_i = tl.load(Mean + i, mask=i < N, other=0.0)
    mean_j = tl.load(Mean + j, mask=j < N, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    for start in range(part * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)[:, None]
        left = tl.load(X + m * N + i, mask=(m < last) & (i < N), other=0.0)
        right = tl.load(X + m * N + j, mask=(m < last) & (j < N), other=0.0)
        # Rows past the end must stay zero, not become minus the mean. 16-bit data go to 16-bit products.
        left_c = tl.where(m < last, left.to(tl.float32) - mean_i, 0.0).to(left.dtype)
        right_c = tl.where(m < last, right.to(tl.float32) - mean_j, 0.0).to(left.dtype)
        acc = tl.dot(tl.trans(left_c), right_c, acc)
    at = Parts + (part * N + tl.trans(i)) * N + j
    tl.store(at, acc / M, mask=(tl.trans(i) < N) & (j < N))


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    BLOCK_N = 64
    columns = triton.cdiv(N, BLOCK_N)

    def split(tiles):
        # As many equal parts as two programs for each of 132 processors allow, of at least 256 rows.
        parts = max(1, min(264 // tiles, triton.cdiv(M, 256)))
        rows_each = triton.cdiv(triton.cdiv(M, parts), 32) * 32
        return rows_each, triton.cdiv(M, rows_each)

    rows_each, parts = split(columns)
    sums = torch.empty(parts, N, device=x.device, dtype=torch.float32)
    _column_sums[(columns, parts)](x, sums, M, N, rows_each, BLOCK_M=32, BLOCK_N=BLOCK_N, num_warps=4)
    mean = sums.sum(0)
    rows_each, parts = split(columns * columns)
    partial = torch.empty(parts, N, N, device=x.device, dtype=torch.float32)
    _covariance_parts[(columns, columns, parts)](
        x, mean, partial, M, N, rows_each, BLOCK_M=32, BLOCK_N=BLOCK_N, num_warps=4, num_stages=3
    )
    return partial.sum(0).to(x.dtype), (x, mean)


# --- backward ---
@triton.jit
def _covariance_bwd(
    G, X, Mean, DX, M, N, g_i, g_j, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + m * N + k[None, :], mask=(m < M) & (k[None, :] < N), other=0.0)
        mean = tl.load(Mean + k, mask=k < N, other=0.0)
        centred = (x.to(tl.float32) - mean[None, :]).to(x.dtype)
        j = k.to(tl.int64)[:, None]
        ok = (j < N) & (n < N)
        g = tl.load(G + j * g_i + n * g_j, mask=ok, other=0.0).to(tl.float32)
        g += tl.load(G + n * g_i + j * g_j, mask=ok, other=0.0).to(tl.float32)
        acc = tl.dot(centred, g.to(x.dtype), acc)
    tl.store(DX + m * N + n, acc / M, mask=(m < M) & (n < N))


def backward(saved, grad_c, needs=None):
    x, mean = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    # Square tiles, since G comes in twice; as large as the matrix allows.
    BLOCK_N = 128 if N >= 128 else 64
    _covariance_bwd[(triton.cdiv(M, 256), triton.cdiv(N, BLOCK_N))](
        grad_c, x, mean, dx, M, N, *grad_c.stride(),
        BLOCK_M=256, BLOCK_N=BLOCK_N, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 256, "N": 64}, {"M": 307, "N": 37}, {"M": 72, "N": 24, "dtype": "bfloat16"})
BENCH = ({"M": 32768, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) + torch.randn(N, generator=g)
    return (x.to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    centred = (x.float() - x.float().mean(0)).to(x.dtype)
    return ((centred.t() @ centred).float() / x.shape[0]).to(x.dtype)
