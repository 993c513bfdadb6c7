"""alpha A B + beta C with learned scalars: five gradients out of two products and one stream.

dA = alpha dY B^T,  dB = alpha A^T dY,  dC = beta dY,  dalpha = <dY, A B>,  dbeta = <dY, C>.
A B is not kept for dalpha: <dY, A B> = <dY B^T, A>, and dY B^T is what the program of dA has in its accumulator. It
multiplies that by its own tile of A and stores one partial sum. dbeta rides on the stream that writes dC.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "matmul_residual_beta",
    "family": "matmul",
    "op": "addmm",
    "schema": 1,
    "techniques": ("epilogue-fusion", "scalar-gradient", "two-stage-partials", "owner-grid"),
    "saves": (),
    "grads": ("a", "b", "c", "alpha", "beta"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _addmm_fwd(A, B, C, Alpha, Beta, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(A + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(B + k[:, None].to(tl.int64) * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    at = m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    c = tl.load(C + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, tl.load(Alpha) * acc + tl.load(Beta) * c, mask=inside)


def _side(size):
    return max(16, min(128, triton.next_power_of_2(size)))


def forward(a, b, c, alpha, beta):
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    (M, K), N = a.shape, b.shape[1]
    y = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BLOCK_M, BLOCK_N = _side(M), _side(N)
    _addmm_fwd[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)](
        a, b, c, alpha, beta, y, M, N, K,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=min(_side(K), 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (a, b, c, alpha, beta)


# --- backward ---
@triton.jit
def _left_right(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The two halves of a tile's columns: what follows a product needs half the registers for each."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def _da_out(acc, A, DA, alpha, m, k, M, K):
    """Store a piece of dA; returns its share of dAlpha."""
    at = m[:, None] * K + k[None, :]
    live = (m[:, None] < M) & (k[None, :] < K)
    a = tl.load(A + at, mask=live, other=0.0).to(tl.float32)
    tl.store(DA + at, alpha * acc, mask=live)
    return tl.sum(tl.sum(acc * a, 1), 0)


@triton.jit
def _addmm_da(
    DY, A, B, Alpha, DA, Parts, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    row, col = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DY.load([row, n]), B.load([col, n]).T, acc)
    # The product A B itself is not at hand: sum(dY * A B) is sum(A * dY B^T), of which this tile has a share.
    m, k = row.to(tl.int64) + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_K // 2)
    left, right = _left_right(acc, BLOCK_M, BLOCK_K)
    alpha = tl.load(Alpha)
    share = _da_out(left, A, DA, alpha, m, k, M, K) + _da_out(right, A, DA, alpha, m, k + BLOCK_K // 2, M, K)
    tl.store(Parts + tl.program_id(0), share)


@triton.jit
def _addmm_db(
    DY, A, Alpha, DB, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(K, BLOCK_K) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    row, col = (band * GROUP + inside % height) * BLOCK_K, inside // height * BLOCK_N
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for m in range(0, M, BLOCK_M):
        acc = tl.dot(A.load([m, row]).T, DY.load([m, col]), acc)
    k, n = row.to(tl.int64) + tl.arange(0, BLOCK_K), col + tl.arange(0, BLOCK_N)
    tl.store(DB + k[:, None] * N + n[None, :], tl.load(Alpha) * acc, mask=(k[:, None] < K) & (n[None, :] < N))


@triton.jit
def _addmm_dc(DY, C, Beta, DC, Parts, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # A program keeps its columns and strides over row tiles, so that few partial sums leave.
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    beta = tl.load(Beta)
    dot = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=2):
        m = start.to(tl.int64) + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < M) & (n[None, :] < N)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :].to(tl.int64) * dy_n, mask=inside, other=0.0).to(tl.float32)
        dot += dy * tl.load(C + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(DC + m[:, None] * N + n[None, :], beta * dy, mask=inside)
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(dot, 1), 0))


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


def backward(saved, grad_y, needs=(True,) * 5):
    a, b, c, alpha, beta = saved
    (M, K), N = a.shape, b.shape[1]
    depth = 128 // a.element_size()
    da = db = dc = dalpha = dbeta = None
    if needs[0] or needs[3]:
        da = torch.empty_like(a)
        BM, BK, BN = min(256, _up(M)), min(128, _up(K)), min(depth, _up(N))
        tiles = triton.cdiv(M, BM) * triton.cdiv(K, BK)
        parts = torch.empty(tiles, device=a.device, dtype=torch.float32)
        _addmm_da[(tiles,)](
            _tiles(grad_y, BM, BN), a, _tiles(b, BK, BN), alpha, da, parts, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        dalpha = parts.sum().to(alpha.dtype)
    if needs[1]:
        db = torch.empty_like(b)
        BK, BN, BM = min(128, _up(K)), min(256, _up(N)), min(depth, _up(M))
        _addmm_db[(triton.cdiv(K, BK) * triton.cdiv(N, BN),)](
            _tiles(grad_y, BM, BN), _tiles(a, BM, BK), alpha, db, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if needs[2] or needs[4]:
        dc = torch.empty_like(c)
        BN = min(128, _up(N))
        grid = min(triton.cdiv(M, 16), 64), triton.cdiv(N, BN)
        parts = torch.empty(grid, device=a.device, dtype=torch.float32)
        _addmm_dc[grid](grad_y, c, beta, dc, parts, M, N, *grad_y.stride(), BLOCK_M=16, BLOCK_N=BN, num_warps=4)
        dbeta = parts.sum().to(beta.dtype)
    return da, db, dc, dalpha, dbeta


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48},
    {"M": 150, "N": 71, "K": 41},
    {"M": 96, "N": 24, "K": 136, "dtype": "bfloat16"},
    {"M": 40, "N": 90, "K": 16, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    matrices = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b, torch.randn(M, N, generator=g)))
    # The scalars are parameters and stay in fp32.
    return *matrices, torch.tensor(0.7, device=device), torch.tensor(-1.3, device=device)


def reference(a, b, c, alpha, beta):
    return (alpha * (a @ b).float() + beta * c.float()).to(a.dtype)
