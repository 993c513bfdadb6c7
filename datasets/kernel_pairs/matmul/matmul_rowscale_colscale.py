"""diag(r) A B diag(c): scales enter while tiles load or leave, and their own gradients are row sums of accumulators.

With P = (dY diag(c)) B^T and Q = A^T (diag(r) dY):
    dA = diag(r) P,  dr[i] = sum over k of A[i, k] P[i, k],    dB = Q diag(c),  dc[j] = sum over k of B[k, j] Q[k, j].
A B is not formed again and no scaled copy of dY is made: the programs of dA and dB hold a tile of P or Q, multiply it
by the same tile of A or B, and leave its row or column sums, one vector per tile along K.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_rowscale_colscale",
    "family": "matmul",
    "op": "scaled_matmul",
    "schema": 1,
    "techniques": (
        "prologue-fusion", "epilogue-fusion", "two-stage-partials", "owner-grid", "strided-cotangent",
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
def _da_drow(
    DY, A, B, Row, Col, DA, DRowParts, M, N, K, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    p = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        bt = tl.load(B + k[None, :] * N + n[:, None], mask=(k[None, :] < K) & (n[:, None] < N), other=0.0)
        col = tl.load(Col + n, mask=n < N, other=0.0)
        # dY is scaled, not B: the left operand of the product may come from registers.
        p = tl.dot((dy.to(tl.float32) * col[None, :]).to(bt.dtype), bt, p)
    at = m[:, None] * K + k[None, :]
    inside = (m[:, None] < M) & (k[None, :] < K)
    a = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DRowParts + tl.program_id(0).to(tl.int64) * M + m, tl.sum(a * p, 1), mask=m < M)
    row = tl.load(Row + m, mask=m < M, other=0.0)
    tl.store(DA + at, row[:, None] * p, mask=inside)


@triton.jit
def _db_dcol(
    DY, A, B, Row, Col, DB, DColParts, M, N, K, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    q = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        at = tl.load(A + m[None, :] * K + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        row = tl.load(Row + m, mask=m < M, other=0.0)
        # Here the left operand is A^T, and it takes the scale of the rows that are summed.
        q = tl.dot((at.to(tl.float32) * row[None, :]).to(dy.dtype), dy, q)
    out = k[:, None] * N + n[None, :]
    inside = (k[:, None] < K) & (n[None, :] < N)
    b = tl.load(B + out, mask=inside, other=0.0).to(tl.float32)
    tl.store(DColParts + tl.program_id(1).to(tl.int64) * N + n, tl.sum(b * q, 0), mask=n < N)
    col = tl.load(Col + n, mask=n < N, other=0.0)
    tl.store(DB + out, q * col[None, :], mask=inside)


def backward(saved, grad_y, needs=(True,) * 4):
    a, b, row_scale, col_scale = saved
    (M, K), N = a.shape, b.shape[1]
    BM, BN, BK = _side(M), _side(N), _side(K)
    depth, tiles_k = 128 // a.element_size(), triton.cdiv(K, BK)
    da = db = drow = dcol = None
    if needs[0] or needs[2]:
        da = torch.empty_like(a)
        parts = torch.empty(tiles_k, M, device=a.device, dtype=torch.float32)
        _da_drow[(tiles_k, triton.cdiv(M, BM))](
            grad_y, a, b, row_scale, col_scale, da, parts, M, N, K, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=BM, BLOCK_N=min(BN, depth), BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
        drow = parts.sum(0).to(row_scale.dtype)
    if needs[1] or needs[3]:
        db = torch.empty_like(b)
        parts = torch.empty(tiles_k, N, device=a.device, dtype=torch.float32)
        _db_dcol[(triton.cdiv(N, BN), tiles_k)](
            grad_y, a, b, row_scale, col_scale, db, parts, M, N, K, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=min(BM, depth), BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=3,
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
BENCH = ({"M": 8192, "N": 2048, "K": 2048, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    matrices = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))
    scales = (0.5 + torch.rand(n, generator=g) for n in (M, N))
    return *matrices, *(s.to(device) for s in scales)


def reference(a, b, row_scale, col_scale):
    return (row_scale[:, None] * (a @ b).float() * col_scale).to(a.dtype)
