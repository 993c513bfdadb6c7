"""LayerNorm of very few, very long rows: every row is split over many programs, in both directions.

In the backward the pieces of a row add their shares of the two row sums to a scratch of two floats per row by atomics;
a second launch owns column tiles, walks down the few rows, writes dx, and so holds dweight and dbias of its columns
complete in registers.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_splitrow",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("atomics", "two-pass", "column-owner", "saved-statistics", "strided-cotangent"),
    "saves": ("stats: fp32 (M, 2)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _piece_moments(X, Pieces, N, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    n = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / tl.minimum(BLOCK, N - piece * BLOCK)
    d = tl.where(n < N, x - mean, 0.0)
    tl.store(Pieces + (row * pieces + piece) * 2, mean)
    tl.store(Pieces + (row * pieces + piece) * 2 + 1, tl.sum(d * d, 0))


@triton.jit
def _normalise_piece(X, W, B, Pieces, Y, Stats, N, pieces, eps, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    # Each program merges the moments of all pieces of its row: cheaper than one more launch that waits for all.
    p = tl.arange(0, BLOCK_P)
    size = tl.where(p < pieces, tl.minimum(BLOCK, N - p * BLOCK), 0).to(tl.float32)
    means = tl.load(Pieces + (row * pieces + p) * 2, mask=p < pieces, other=0.0)
    squares = tl.load(Pieces + (row * pieces + p) * 2 + 1, mask=p < pieces, other=0.0)
    mean = tl.sum(means * size, 0) / N
    away = means - mean
    rstd = tl.rsqrt(tl.sum(squares + size * away * away, 0) / N + eps)
    if piece == 0:
        tl.store(Stats + 2 * row, mean)
        tl.store(Stats + 2 * row + 1, rstd)
    n = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, (x - mean) * rstd * w + b, mask=n < N)


def _piece(M, N):
    """Columns of a piece: some thousand programs over all rows, at most 1024 pieces in a row."""
    wanted = triton.next_power_of_2(triton.cdiv(M * N, 2048))
    return max(128, min(8192, max(wanted, triton.next_power_of_2(triton.cdiv(N, 1024)))))


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    BLOCK = _piece(M, N)
    pieces = triton.cdiv(N, BLOCK)
    moments = torch.empty(M, pieces, 2, device=x.device, dtype=torch.float32)
    stats = torch.empty(M, 2, device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    warps = max(1, min(8, BLOCK // 512))
    _piece_moments[(pieces, M)](x, moments, N, pieces, BLOCK=BLOCK, num_warps=warps)
    _normalise_piece[(pieces, M)](
        x, weight, bias, moments, y, stats, N, pieces, eps,
        BLOCK=BLOCK, BLOCK_P=triton.next_power_of_2(pieces), num_warps=warps,
    )  # fmt: skip
    return y, (x, weight, stats)


# --- backward ---
@triton.jit
def _row_sums(DY, X, W, Stats, Sums, N, dy_m, dy_n, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_m + n * dy_n, mask=n < N, other=0.0).to(tl.float32)
    wdy = dy * tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    mean = tl.load(Stats + 2 * row)
    rstd = tl.load(Stats + 2 * row + 1)
    # Two numbers for thousands of elements: the queue at a row's sums is as long as its pieces are many.
    tl.atomic_add(Sums + 2 * row, tl.sum(wdy * (x - mean), 0) * rstd, sem="relaxed")
    tl.atomic_add(Sums + 2 * row + 1, tl.sum(wdy, 0), sem="relaxed")


@triton.jit
def _columns_dx(DY, X, W, Stats, Sums, DX, DW, DB, M, N, dy_m, dy_n, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = n < N
    w = tl.load(W + n, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for m in range(M):
        row = tl.cast(m, tl.int64)
        mean = tl.load(Stats + 2 * row)
        rstd = tl.load(Stats + 2 * row + 1)
        c1 = tl.load(Sums + 2 * row) / N
        c2 = tl.load(Sums + 2 * row + 1) / N
        x = tl.load(X + row * N + n, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_m + n * dy_n, mask=ok, other=0.0).to(tl.float32)
        xhat = (x - mean) * rstd
        tl.store(DX + row * N + n, rstd * (dy * w - c2 - xhat * c1), mask=ok)
        dw += dy * xhat
        db += dy
    tl.store(DW + n, dw, mask=ok)
    tl.store(DB + n, db, mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, stats = saved
    M, N = x.shape
    sums = torch.zeros(M, 2, device=x.device, dtype=torch.float32)
    dx = torch.empty_like(x)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    BLOCK = _piece(M, N)
    _row_sums[(triton.cdiv(N, BLOCK), M)](
        grad_y, x, weight, stats, sums, N, grad_y.stride(0), grad_y.stride(1),
        BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 1024)),
    )  # fmt: skip
    TILE = max(128, min(1024, triton.next_power_of_2(triton.cdiv(N, 528))))
    _columns_dx[(triton.cdiv(N, TILE),)](
        grad_y, x, weight, stats, sums, dx, dweight, dbias, M, N, grad_y.stride(0), grad_y.stride(1),
        BLOCK=TILE, num_warps=4 if TILE >= 512 else 2,
    )  # fmt: skip
    return dx, dweight, dbias


# --- check ---
SWEEP = ({"M": 2, "N": 1024}, {"M": 3, "N": 1571, "dtype": "float16"}, {"M": 2, "N": 1152, "dtype": "bfloat16"})
BENCH = ({"M": 16, "N": 1048576, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) * 2.0 + 1.0
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
