"""diag(r) A B diag(c): one enters by a pass, one as tiles leave; their own gradients are row sums of accumulators.

With P = (dY diag(c)) B^T and Q = A^T (diag(r) dY):
    dA = diag(r) P,  dr[i] = sum over k of A[i, k] P[i, k],    dB = Q diag(c),  dc[j] = sum over k of B[k, j] Q[k, j].
A B is not formed again. The scale of a summed axis is put on A or B beforehand, for P = dY (B diag(c))^T and
Q = (diag(r) A)^T dY: a pass of theirs costs less than scaling in the loops, where tiles would leave the direct way from
memory to the tensor cores. The programs of dA and dB hold a tile of P or Q, multiply it by the same tile of A or B, and
leave its row or column sums, one vector per tile along K.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "matmul_rowscale_colscale",
    "family": "matmul",
    "op": "scaled_matmul",
    "schema": 1,
    "techniques": (
        "epilogue-fusion", "two-stage-partials", "owner-grid",
    ),
    "saves": (),
    "grads": ("a", "b", "row_scale", "col_scale"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _scaled_matmul_fwd(A, B, Row, Col, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = A + m[:, None] * K + k[None, :]
    b_ptrs = B + k[:, None].to(tl.int64) * N + n[None, :]
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for left in range(K, 0, -BLOCK_K):
        a = tl.load(a_ptrs, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        product = tl.dot(a, b, product)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    row = tl.load(Row + m, mask=m < M, other=0.0)
    col = tl.load(Col + n, mask=n < N, other=0.0)
    y = row[:, None] * product * col[None, :]
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


def _side(size):
    return max(16, min(128, triton.next_power_of_2(size)))


def forward(a, b, row_scale, col_scale):
    a, b, row_scale, col_scale = (x.contiguous() for x in (a, b, row_scale, col_scale))
    (M, K), N = a.shape, b.shape[1]
    y = torch.empty(M, N, device=a.device, dtype=a.dtype)
    BM, BN = _side(M), _side(N)
    _scaled_matmul_fwd[(triton.cdiv(N, BN), triton.cdiv(M, BM))](
        a, b, row_scale, col_scale, y, M, N, K,
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=min(_side(K), 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (a, b, row_scale, col_scale)


# --- backward ---
@triton.jit
def _left_right(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The two halves of a tile's columns: what follows a product needs half the registers for each."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def _scaled(X, Out, Row, Col, rows, cols, out_r, BY_ROW: tl.constexpr, BLOCK: tl.constexpr):
    # A scale of the summed axis belongs to an operand. Once in memory, a product reads it straight to shared memory.
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + r * cols + c, mask=c < cols, other=0.0).to(tl.float32)
    if BY_ROW:
        x *= tl.load(Row + r)
    else:
        x *= tl.load(Col + c, mask=c < cols, other=0.0)
    tl.store(Out + r * out_r + c, x, mask=c < cols)


@triton.jit
def _da_out(p, A, row, DA, m, k, M, K):
    """Store a piece of dA; returns its share of dRow."""
    at = m[:, None] * K + k[None, :]
    live = (m[:, None] < M) & (k[None, :] < K)
    a = tl.load(A + at, mask=live, other=0.0).to(tl.float32)
    tl.store(DA + at, row[:, None] * p, mask=live)
    return tl.sum(a * p, 1)


@triton.jit
def _da_drow(
    DY, A, Scaled, Row, DA, DRowParts, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # P = dY (B Col)^T; then dA = Row P, and the row sums of A P are dRow.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    first_m, tile_k = (band * GROUP + inside % height) * BLOCK_M, inside // height
    p = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        p = tl.dot(DY.load([first_m, n]), Scaled.load([tile_k * BLOCK_K, n]).T, p)
    m, k = first_m.to(tl.int64) + tl.arange(0, BLOCK_M), tile_k * BLOCK_K + tl.arange(0, BLOCK_K // 2)
    row = tl.load(Row + m, mask=m < M, other=0.0)
    left, right = _left_right(p, BLOCK_M, BLOCK_K)
    sums = _da_out(left, A, row, DA, m, k, M, K) + _da_out(right, A, row, DA, m, k + BLOCK_K // 2, M, K)
    tl.store(DRowParts + tile_k.to(tl.int64) * M + m, sums, mask=m < M)


@triton.jit
def _db_out(q, B, Col, DB, DColPart, k, n, N, K):
    """Store a piece of dB, and its share of dCol."""
    out = k[:, None] * N + n[None, :]
    live = (k[:, None] < K) & (n[None, :] < N)
    b = tl.load(B + out, mask=live, other=0.0).to(tl.float32)
    tl.store(DColPart + n, tl.sum(b * q, 0), mask=n < N)
    tl.store(DB + out, q * tl.load(Col + n, mask=n < N, other=0.0)[None, :], mask=live)


@triton.jit
def _db_dcol(
    DY, Scaled, B, Col, DB, DColParts, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Q = (Row A)^T dY; then dB = Q Col, and the column sums of B Q are dCol.
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(K, BLOCK_K) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    tile_k, first_n = band * GROUP + inside % height, inside // height * BLOCK_N
    q = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for m in range(0, M, BLOCK_M):
        q = tl.dot(Scaled.load([m, tile_k * BLOCK_K]).T, DY.load([m, first_n]), q)
    k, n = tile_k.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K), first_n + tl.arange(0, BLOCK_N // 2)
    parts = DColParts + tile_k.to(tl.int64) * N
    left, right = _left_right(q, BLOCK_K, BLOCK_N)
    _db_out(left, B, Col, DB, parts, k, n, N, K)
    _db_out(right, B, Col, DB, parts, k, n + BLOCK_N // 2, N, K)


def _room(rows, cols, like):
    """A matrix whose rows start on sixteen bytes."""
    step = 16 // like.element_size()
    return like.new_empty(rows, triton.cdiv(cols, step) * step)[:, :cols]


def _times(matrix, row_scale, col_scale, by_row):
    rows, cols = matrix.shape
    out = _room(rows, cols, matrix)
    _scaled[(rows, triton.cdiv(cols, 1024))](
        matrix, out, row_scale, col_scale, rows, cols, out.stride(0), BY_ROW=by_row, BLOCK=1024, num_warps=4
    )
    return out


def _tiles(matrix, rows, cols):
    aligned = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    if not aligned or (matrix.stride(0) | matrix.storage_offset()) * matrix.element_size() % 16:
        dense = _room(*matrix.shape, matrix)
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=(True,) * 4):
    a, b, row_scale, col_scale = saved
    (M, K), N = a.shape, b.shape[1]
    depth = 128 // a.element_size()
    da = db = drow = dcol = None
    if needs[0] or needs[2]:
        da = torch.empty_like(a)
        BM, BK, BN = min(256, _up(M)), min(128, _up(K)), min(depth, _up(N))
        parts = torch.empty(triton.cdiv(K, BK), M, device=a.device, dtype=torch.float32)
        scaled = _times(b, row_scale, col_scale, False)
        _da_drow[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), a, _tiles(scaled, BK, BN), row_scale, da, parts, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        drow = parts.sum(0).to(row_scale.dtype)
    if needs[1] or needs[3]:
        db = torch.empty_like(b)
        BK, BN, BM = min(128, _up(K)), min(256, _up(N)), min(depth, _up(M))
        parts = torch.empty(triton.cdiv(K, BK), N, device=a.device, dtype=torch.float32)
        scaled = _times(a, row_scale, col_scale, True)
        _db_dcol[(triton.cdiv(K, BK) * triton.cdiv(N, BN),)](
            _tiles(grad_y, BM, BN), _tiles(scaled, BM, BK), b, col_scale, db, parts, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        dcol = parts.sum(0).to(col_scale.dtype)
    return da, db, drow, dcol


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48},
    {"M": 150, "N": 71, "K": 41},
    {"M": 40, "N": 24, "K": 264, "dtype": "bfloat16"},
    {"M": 40, "N": 90, "K": 16, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    matrices = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))
    scales = (0.5 + torch.rand(n, generator=g) for n in (M, N))
    return *matrices, *(s.to(device) for s in scales)


def reference(a, b, row_scale, col_scale):
    return (row_scale[:, None] * (a @ b).float() * col_scale).to(a.dtype)
