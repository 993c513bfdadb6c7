"""Covariance of columns, centred X^T X / M: one product of the centred X with G + G^T is the whole gradient.

    C = Xc^T Xc / M,  Xc = X - mean,    dX = Xc (G + G^T) / M

The mean's own derivative would take the column means off dX; they are zero, because those of Xc are. Two
passes write Xc and G + G^T, each read by many programs of the product.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "correlation_matrix_cols",
    "family": "reduction_stat",
    "op": "covariance",
    "schema": 1,
    "techniques": ("saved-statistics", "split-k", "strided-cotangent"),
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
def _centred(X, Mean, Out, N, out_m, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + m * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Out + m * out_m + n, x - tl.load(Mean + n, mask=n < N, other=0.0), mask=n < N)


@triton.jit
def _both_ways(G, Out, N, out_i, g_i, g_j, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = (i[:, None] < N) & (j[None, :] < N)
    g = tl.load(G + i[:, None] * g_i + j[None, :] * g_j, mask=ok, other=0.0).to(tl.float32)
    turned = tl.load(G + j[:, None] * g_i + i[None, :] * g_j, mask=(j[:, None] < N) & (i[None, :] < N), other=0.0)
    tl.store(Out + i[:, None] * out_i + j[None, :], g + tl.trans(turned).to(tl.float32), mask=ok)


@triton.jit
def _covariance_bwd(
    Centred, Both, DX, M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    m, n = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, N, BLOCK_K):
        acc = tl.dot(Centred.load([m, k]), Both.load([k, n]), acc)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    tl.store(DX + rows[:, None] * N + cols[None, :], acc / M, mask=(rows[:, None] < M) & (cols[None, :] < N))


def _room(rows, cols, like):
    """A matrix whose rows start on sixteen bytes, as descriptors need them."""
    step = 16 // like.element_size()
    return like.new_empty(rows, triton.cdiv(cols, step) * step)[:, :cols]


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    starts = (matrix.stride(0) | matrix.storage_offset()) * matrix.element_size()
    if matrix.stride(1) != 1 or matrix.stride(0) < matrix.shape[1] or starts % 16:
        dense = _room(*matrix.shape, matrix)
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_c, needs=None):
    x, mean = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    centred, both, edge = _room(M, N, x), _room(N, N, x), min(64, _up(N))
    _centred[(M, triton.cdiv(N, 2048))](x, mean, centred, N, centred.stride(0), BLOCK=2048, num_warps=4)
    _both_ways[(triton.cdiv(N, edge), triton.cdiv(N, edge))](
        grad_c, both, N, both.stride(0), *grad_c.stride(), BLOCK=edge, num_warps=4
    )
    BM, BN, BK = min(128, _up(M)), min(256, _up(N)), min(128 // x.element_size(), _up(N))
    _covariance_bwd[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)](
        _tiles(centred, BM, BK), _tiles(both, BK, BN), dx, M, N,
        GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 256, "N": 64}, {"M": 307, "N": 37}, {"M": 72, "N": 24, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) + torch.randn(N, generator=g)
    return (x.to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    centred = (x.float() - x.float().mean(0)).to(x.dtype)
    return ((centred.t() @ centred).float() / x.shape[0]).to(x.dtype)
