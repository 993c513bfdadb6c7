"""VeRA: a frozen weight and a frozen, shared low-rank pair, of which only two scale vectors learn.

y = x W^T + b * ((d * x A^T) B^T) with W (N, K), A (R, K) and B (N, R) frozen. Saved is h = x A^T, R wide. Gradients of
both vectors are column sums of a product times a tensor at hand, and neither product is stored for them: with p = (dy
b) B the program that makes a tile of p sums h p over its rows for dd before it leaves q = d p; a tile of (d h) B^T is
made again, multiplied by dy and summed for db. dx = dy W + q A is one accumulator over both.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "vera_shared_vectors",
    "family": "low_rank",
    "op": "vera_linear",
    "schema": 1,
    "techniques": (
        "partial-gradient", "epilogue-fusion", "prologue-fusion", "two-stage-partials", "recompute",
        "strided-cotangent",
    ),
    "saves": ("h: bf16 or fp16 (M, R)",),
    "grads": ("x", "d", "b"),
    "dtypes": ("bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _tile(X, row, column, rows, columns, s_row, s_column):
    """Tile of a matrix in any strides, zeros outside."""
    at = row.to(tl.int64)[:, None] * s_row + column.to(tl.int64)[None, :] * s_column
    return tl.load(X + at, mask=(row[:, None] < rows) & (column[None, :] < columns), other=0.0)


@triton.jit
def _down(X, A, H, M, R, K, x_m, x_k, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        acc = tl.dot(_tile(X, m, k, M, K, x_m, x_k), tl.trans(_tile(A, r, k, R, K, K, 1)), acc)
    out = m.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(H + out, acc, mask=(m[:, None] < M) & (r[None, :] < R))


@triton.jit
def _vera_fwd(
    X, W, H, B, D, Scale, Y, M, N, K, R, x_m, x_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, R, BLOCK_K):
        r = start + tl.arange(0, BLOCK_K)
        d = tl.load(D + r, mask=r < R, other=0.0)
        h = _tile(H, m, r, M, R, R, 1)
        acc = tl.dot((h * d[None, :]).to(h.dtype), tl.trans(_tile(B, n, r, N, R, R, 1)), acc)
    # Scaled by b, the adapter's share is what the frozen product begins with.
    acc *= tl.load(Scale + n, mask=n < N, other=0.0)[None, :]
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        acc = tl.dot(_tile(X, m, k, M, K, x_m, x_k), tl.trans(_tile(W, n, k, N, K, K, 1)), acc)
    out = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(Y + out, acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, weight, a, b_matrix, d, b):
    weight, a, b_matrix = weight.contiguous(), a.contiguous(), b_matrix.contiguous()
    (M, K), N, R = x.shape, weight.shape[0], a.shape[0]
    h = torch.empty(M, R, device=x.device, dtype=x.dtype)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N, BLOCK_R = _side(M), _side(N), _side(R, 64)
    _down[(triton.cdiv(M, BLOCK_M), triton.cdiv(R, BLOCK_R))](
        x, a, h, M, R, K, *x.stride(), BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R, BLOCK_K=64, num_warps=4, num_stages=3
    )
    _vera_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x, weight, h, b_matrix, d, b, y, M, N, K, R, *x.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (weight, a, b_matrix, d, b, h)


# --- backward ---
@triton.jit
def _vera_up_bwd(
    DY, B, D, Scale, H, Q, Parts, M, N, R, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    p = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        scale = tl.load(Scale + n, mask=n < N, other=0.0)
        # b goes to the frozen side: a small cotangent is not made smaller before it is rounded.
        up = _tile(B, n, r, N, R, R, 1)
        p = tl.dot(_tile(DY, m, n, M, N, dy_m, dy_n), (up * scale[:, None]).to(up.dtype), p)
    h = _tile(H, m, r, M, R, R, 1).to(tl.float32)
    tl.store(Parts + tl.program_id(0).to(tl.int64) * R + r, tl.sum(h * p, 0), mask=r < R)
    d = tl.load(D + r, mask=r < R, other=0.0)
    out = m.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(Q + out, p * d[None, :], mask=(m[:, None] < M) & (r[None, :] < R))


@triton.jit
def _vera_dx(
    DY, W, Q, A, DX, M, N, K, R, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        acc = tl.dot(_tile(DY, m, n, M, N, dy_m, dy_n), _tile(W, n, k, N, K, K, 1), acc)
    for start in range(0, R, BLOCK_N):
        r = start + tl.arange(0, BLOCK_N)
        acc = tl.dot(_tile(Q, m, r, M, R, R, 1), _tile(A, r, k, R, K, K, 1), acc)
    out = m.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(DX + out, acc, mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def _vera_db(
    DY, H, B, D, Parts, M, N, R, dy_m, dy_n, rows_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * rows_each
    last = tl.minimum(first + rows_each, M)
    db = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        v = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, R, BLOCK_R):
            r = step + tl.arange(0, BLOCK_R)
            d = tl.load(D + r, mask=r < R, other=0.0)
            h = _tile(H, m, r, M, R, R, 1)
            v = tl.dot((h * d[None, :]).to(h.dtype), tl.trans(_tile(B, n, r, N, R, R, 1)), v)
        dy = _tile(DY, m, n, last, N, dy_m, dy_n).to(tl.float32)
        db += tl.sum(dy * v, 0)
    tl.store(Parts + tl.program_id(1).to(tl.int64) * N + n, db, mask=n < N)


def backward(saved, grad_y, needs=None):
    weight, a, b_matrix, d, b, h = saved
    need_x, need_d, need_b = needs or (True, True, True)
    (M, R), (N, K) = h.shape, weight.shape
    BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R = _side(M), _side(N), _side(K), _side(R, 64)
    rows = triton.cdiv(M, BLOCK_M)
    dx = dd = db = None
    if need_x or need_d:
        q = torch.empty_like(h)
        parts = torch.empty(rows, R, device=h.device, dtype=torch.float32)
        _vera_up_bwd[(rows, triton.cdiv(R, BLOCK_R))](
            grad_y, b_matrix, d, b, h, q, parts, M, N, R, *grad_y.stride(),
            BLOCK_M=BLOCK_M, BLOCK_N=64, BLOCK_R=BLOCK_R, num_warps=4, num_stages=3,
        )  # fmt: skip
        dd = parts.sum(0).to(d.dtype)
    if need_x:
        dx = torch.empty(M, K, device=h.device, dtype=h.dtype)
        _vera_dx[(rows, triton.cdiv(K, BLOCK_K))](
            grad_y, weight, q, a, dx, M, N, K, R, *grad_y.stride(),
            BLOCK_M=BLOCK_M, BLOCK_N=64, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
    if need_b:
        # Some two programs for each of 132 processors.
        bands = max(1, min(rows, 264 // triton.cdiv(N, BLOCK_N)))
        rows_each = triton.cdiv(rows, bands) * BLOCK_M
        bands = triton.cdiv(M, rows_each)
        parts = torch.empty(bands, N, device=h.device, dtype=torch.float32)
        _vera_db[(triton.cdiv(N, BLOCK_N), bands)](
            grad_y, h, b_matrix, d, parts, M, N, R, *grad_y.stride(), rows_each,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R, num_warps=8, num_stages=3,
        )  # fmt: skip
        db = parts.sum(0).to(b.dtype)
    return dx, dd, db


# --- check ---
SWEEP = (
    {"M": 48, "N": 32, "K": 64, "R": 16, "dtype": "float16"},
    {"M": 37, "N": 75, "K": 51, "R": 20, "dtype": "float16"},
    {"M": 160, "N": 40, "K": 32, "R": 80, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 4096, "R": 256, "dtype": "bfloat16"},)


def make_args(M, N, K, R, dtype="bfloat16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes, fan = ((M, K), (N, K), (R, K), (N, R)), (1, K, K, R)
    matrices = (torch.randn(shape, generator=g) * f**-0.5 for shape, f in zip(shapes, fan, strict=True))
    vectors = torch.rand(R, generator=g), torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (*matrices, *vectors))


def reference(x, weight, a, b_matrix, d, b):
    return x @ weight.T + b * ((d * (x @ a.T)) @ b_matrix.T)
