"""Three LoRA projections (q, k, v) of one x with frozen weights: all of dx is summed in one accumulator.

y_p = x W_p^T + s (x A_p^T) B_p^T for p in q, k, v. What reads x reads it once for the three: the rank-sized x A_p^T in
the forward (saved, 3 R columns beside thousands) and the three dA_p in the backward. The program that owns a tile of dx
runs through dy_q W_q, dy_k W_k, dy_v W_v and the low-rank terms without leaving its registers.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "lora_qkv_shared_x",
    "family": "low_rank",
    "op": "lora_qkv",
    "schema": 1,
    "techniques": (
        "partial-gradient", "split-k", "two-stage-partials", "epilogue-fusion", "optional-cotangent",
    ),
    "saves": ("low: fp32 or bf16 or fp16 (3, M, R)",),
    "grads": ("x", "a_q", "b_q", "a_k", "b_k", "a_v", "b_v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _three_lows(
    X, AQ, AK, AV, Low, M, K, R, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    # One read of x for three thin products.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    q = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    k = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    v = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + m[:, None] * K + j[None, :], mask=(m[:, None] < M) & (j[None, :] < K), other=0.0)
        a_at = r[None, :] * K + j[:, None]
        a_ok = (r[None, :] < R) & (j[:, None] < K)
        q = tl.dot(x, tl.load(AQ + a_at, mask=a_ok, other=0.0), q)
        k = tl.dot(x, tl.load(AK + a_at, mask=a_ok, other=0.0), k)
        v = tl.dot(x, tl.load(AV + a_at, mask=a_ok, other=0.0), v)
    at = Low + m[:, None] * R + r[None, :]
    ok = (m[:, None] < M) & (r[None, :] < R)
    size = tl.cast(M, tl.int64) * R
    tl.store(at, q, mask=ok)
    tl.store(at + size, k, mask=ok)
    tl.store(at + 2 * size, v, mask=ok)


@triton.jit
def _lora_project(
    X, W, Low, B, Y, M, N, K, R, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Column tiles vary fastest, so that programs side by side share their rows of x in L2.
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + m[:, None] * K + j[None, :], mask=(m[:, None] < M) & (j[None, :] < K), other=0.0)
        w = tl.load(W + n[None, :] * K + j[:, None], mask=(n[None, :] < N) & (j[:, None] < K), other=0.0)
        acc = tl.dot(x, w, acc)
    low = tl.load(Low + m[:, None] * R + r[None, :], mask=(m[:, None] < M) & (r[None, :] < R), other=0.0)
    b = tl.load(B + n[None, :] * R + r[:, None], mask=(n[None, :] < N) & (r[:, None] < R), other=0.0)
    acc += tl.dot(low, b) * scale
    tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, w_q, w_k, w_v, a_q, b_q, a_k, b_k, a_v, b_v, scale):
    x, w_q, w_k, w_v, a_q, b_q, a_k, b_k, a_v, b_v = (
        t.contiguous() for t in (x, w_q, w_k, w_v, a_q, b_q, a_k, b_k, a_v, b_v)
    )
    M, K = x.shape
    R = a_q.shape[0]
    rank = max(16, triton.next_power_of_2(R))
    step = 128 // x.element_size()
    low = torch.empty(3, M, R, device=x.device, dtype=x.dtype)
    _three_lows[(triton.cdiv(M, 64),)](
        x, a_q, a_k, a_v, low, M, K, R, BLOCK_M=64, BLOCK_K=step, BLOCK_R=rank, num_warps=4, num_stages=3
    )
    outputs = []
    for w, b, low_p in zip((w_q, w_k, w_v), (b_q, b_k, b_v), low.unbind(), strict=True):
        N = w.shape[0]
        y = torch.empty(M, N, device=x.device, dtype=x.dtype)
        _lora_project[(triton.cdiv(N, 128), triton.cdiv(M, 128))](
            x, w, low_p, b, y, M, N, K, R, scale,
            BLOCK_M=128, BLOCK_N=128, BLOCK_K=step, BLOCK_R=rank, num_warps=8, num_stages=3,
        )  # fmt: skip
        outputs.append(y)
    return tuple(outputs), (x, w_q, w_k, w_v, a_q, b_q, a_k, b_k, a_v, b_v, low, scale)


# --- backward ---
@triton.jit
def _dy_b(DY, B, DLow, M, N, R, scale, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    # Gradient of x A^T: s dy B.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        b = tl.load(B + n[:, None] * R + r[None, :], mask=(n[:, None] < N) & (r[None, :] < R), other=0.0)
        acc = tl.dot(dy, b, acc)
    tl.store(DLow + m[:, None] * R + r[None, :], acc * scale, mask=(m[:, None] < M) & (r[None, :] < R))


@triton.jit
def _add_dy_w(
    acc, DY, W, DLow, A, row, col, M, N, K, R,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One projection's share of a tile of dx: dy W + dlow A, the rank being one more slice of the summed axis."""
    m, k = row.to(tl.int64) + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    dlow = tl.load(DLow + m[:, None] * R + r[None, :], mask=(m[:, None] < M) & (r[None, :] < R), other=0.0)
    a = tl.load(A + r[:, None] * K + k[None, :], mask=(r[:, None] < R) & (k[None, :] < K), other=0.0)
    acc = tl.dot(dlow, a, acc)
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DY.load([row, n]), W.load([n, col]), acc)
    return acc


@triton.jit
def _shared_dx(
    DYQ, DYK, DYV, WQ, WK, WV, DLow, AQ, AK, AV, DX, M, NQ, NK, NV, K, R, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    row, col = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    size = tl.cast(M, tl.int64) * R
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    acc = _add_dy_w(acc, DYQ, WQ, DLow, AQ, row, col, M, NQ, K, R, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R)
    acc = _add_dy_w(acc, DYK, WK, DLow + size, AK, row, col, M, NK, K, R, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R)
    acc = _add_dy_w(acc, DYV, WV, DLow + 2 * size, AV, row, col, M, NV, K, R, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R)
    m, k = row.to(tl.int64) + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_K)
    tl.store(DX + m[:, None] * K + k[None, :], acc, mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def _three_da(
    X, DLow, Parts, M, K, R, rows_each, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    # dA_p = dlow_p^T x over the rows of one split, for all p from one read of x.
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    split = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    last = tl.minimum((split + 1) * rows_each, M)
    size = tl.cast(M, tl.int64) * R
    q = tl.zeros((BLOCK_K, BLOCK_R), tl.float32)
    kk = tl.zeros((BLOCK_K, BLOCK_R), tl.float32)
    v = tl.zeros((BLOCK_K, BLOCK_R), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        xt = tl.load(X + m[None, :] * K + k[:, None], mask=(m[None, :] < last) & (k[:, None] < K), other=0.0)
        at = DLow + m[:, None] * R + r[None, :]
        ok = (m[:, None] < last) & (r[None, :] < R)
        q = tl.dot(xt, tl.load(at, mask=ok, other=0.0), q)
        kk = tl.dot(xt, tl.load(at + size, mask=ok, other=0.0), kk)
        v = tl.dot(xt, tl.load(at + 2 * size, mask=ok, other=0.0), v)
    at = Parts + split * 3 * R * K + r[None, :] * K + k[:, None]
    ok = (r[None, :] < R) & (k[:, None] < K)
    tl.store(at, q, mask=ok)
    tl.store(at + R * K, kk, mask=ok)
    tl.store(at + 2 * R * K, v, mask=ok)


@triton.jit
def _db_split(
    DY, Low, Parts, M, N, R, scale, dy_m, dy_n, rows_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # dB = s dy^T (x A^T) over the rows of one split.
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    last = tl.minimum((split + 1) * rows_each, M)
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        dyt = tl.load(
            DY + m[None, :] * dy_m + n[:, None] * dy_n, mask=(m[None, :] < last) & (n[:, None] < N), other=0.0
        )
        low = tl.load(Low + m[:, None] * R + r[None, :], mask=(m[:, None] < last) & (r[None, :] < R), other=0.0)
        acc = tl.dot(dyt, low, acc)
    at = split * N * R + n[:, None] * R + r[None, :]
    tl.store(Parts + at, acc * scale, mask=(n[:, None] < N) & (r[None, :] < R))


def _splits(M, tiles):
    """Splits of the rows and rows of each: two waves on 132 processors, whole blocks of 64 rows."""
    rows_each = triton.cdiv(triton.cdiv(M, max(1, 264 // tiles)), 64) * 64
    return triton.cdiv(M, rows_each), rows_each


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


def backward(saved, grad_q, grad_k, grad_v, needs=None):
    x, w_q, w_k, w_v, a_q, b_q, a_k, b_k, a_v, b_v, low, scale = saved
    needs = needs or (True,) * 7
    M, K = x.shape
    R = a_q.shape[0]
    rank = max(16, triton.next_power_of_2(R))
    step = 128 // x.element_size()
    # Few rows for each program: a thin product has nothing else to fill a device with.
    thin = max(16, min(64, triton.next_power_of_2(M) // 256))
    cotangents = (grad_q, grad_k, grad_v)
    need_a = any(needs[1::2])
    dlow = torch.empty_like(low)
    dbs = [None, None, None]
    for p, (dy, b) in enumerate(zip(cotangents, (b_q, b_k, b_v), strict=True)):
        if dy is None:
            dlow[p].zero_()
            continue
        N = b.shape[0]
        if needs[0] or need_a:
            _dy_b[(triton.cdiv(M, thin),)](
                dy, b, dlow[p], M, N, R, scale, dy.stride(0), dy.stride(1),
                BLOCK_M=thin, BLOCK_N=2 * step, BLOCK_R=rank, num_warps=max(2, thin // 16), num_stages=4,
            )  # fmt: skip
        if needs[2 + 2 * p]:
            tiles = triton.cdiv(N, 64)
            splits, rows_each = _splits(M, tiles)
            parts = torch.empty(splits, N, R, device=x.device, dtype=torch.float32)
            _db_split[(tiles, splits)](
                dy, low[p], parts, M, N, R, scale, dy.stride(0), dy.stride(1), rows_each,
                BLOCK_M=64, BLOCK_N=64, BLOCK_R=rank, num_warps=4, num_stages=3,
            )  # fmt: skip
            dbs[p] = parts.sum(0).to(b.dtype)
    dx = None
    if needs[0]:
        dx = torch.empty_like(x)
        # A missing cotangent has no columns: its loop does not run.
        widths = [0 if dy is None else dy.shape[1] for dy in cotangents]
        dys = [x if dy is None else dy for dy in cotangents]
        BM, BK, BN = min(128, _up(M)), min(256, _up(K)), min(step, _up(min(w_q.shape[0], w_k.shape[0])))
        tiles = (*(_tiles(dy, BM, BN) for dy in dys), *(_tiles(w, BN, BK) for w in (w_q, w_k, w_v)))
        _shared_dx[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            *tiles, dlow, a_q, a_k, a_v, dx, M, *widths, K, R,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, BLOCK_R=rank, num_warps=8, num_stages=4,
        )  # fmt: skip
    das = (None, None, None)
    if need_a:
        tiles = triton.cdiv(K, 64)
        splits, rows_each = _splits(M, tiles)
        parts = torch.empty(splits, 3, R, K, device=x.device, dtype=torch.float32)
        _three_da[(tiles, splits)](
            x, dlow, parts, M, K, R, rows_each, BLOCK_M=64, BLOCK_K=64, BLOCK_R=rank, num_warps=4, num_stages=3
        )
        das = parts.sum(0).to(a_q.dtype)
    return dx, das[0], dbs[0], das[1], dbs[1], das[2], dbs[2]


# --- check ---
SWEEP = (
    {"M": 96, "NQ": 64, "NK": 32, "K": 48, "R": 16},
    {"M": 71, "NQ": 45, "NK": 23, "K": 37, "R": 5, "dtype": "float16"},
    {"M": 64, "NQ": 32, "NK": 16, "K": 40, "R": 8, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "NQ": 4096, "NK": 1024, "K": 4096, "R": 16, "dtype": "bfloat16"},)


def make_args(M, NQ, NK, K, R, dtype="float32", device="cpu", seed=0):
    # Keys and values have fewer heads than queries.
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(N, K, generator=g) * K**-0.5 for N in (NQ, NK, NK)]
    factors = []
    for N in (NQ, NK, NK):
        factors += [torch.randn(R, K, generator=g) * K**-0.5, torch.randn(N, R, generator=g) * R**-0.5]
    tensors = (torch.randn(M, K, generator=g), *weights, *factors)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.5)


def reference(x, w_q, w_k, w_v, a_q, b_q, a_k, b_k, a_v, b_v, scale):
    def project(w, a, b):
        return x @ w.t() + scale * ((x @ a.t()) @ b.t())

    return project(w_q, a_q, b_q), project(w_k, a_k, b_k), project(w_v, a_v, b_v)
