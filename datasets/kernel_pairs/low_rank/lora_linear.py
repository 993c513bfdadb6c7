"""LoRA linear x W^T + s (x A^T) B^T with frozen W: dx is one fused product, dA and dB share a split-K kernel."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "lora_linear",
    "family": "low_rank",
    "op": "lora_linear",
    "schema": 1,
    "techniques": ("partial-gradient", "recompute", "split-k", "two-stage-partials", "epilogue-fusion"),
    "saves": (),
    "grads": ("x", "lora_a", "lora_b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _lora_fwd(
    X, W, A, B, Y, M, N, K, R, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        x = tl.load(X + m[:, None] * K + kk[None, :], mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0)
        w = tl.load(W + n[None, :] * K + kk[:, None], mask=(n[None, :] < N) & (kk[:, None] < K), other=0.0)
        a = tl.load(A + r[None, :] * K + kk[:, None], mask=(r[None, :] < R) & (kk[:, None] < K), other=0.0)
        acc = tl.dot(x, w, acc)
        # Every column tile repeats x A^T: R columns beside BLOCK_N cost less than a launch and a round trip.
        low = tl.dot(x, a, low)
    b = tl.load(B + n[None, :] * R + r[:, None], mask=(n[None, :] < N) & (r[:, None] < R), other=0.0)
    acc += tl.dot(low.to(b.dtype), b) * scale
    tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, weight, lora_a, lora_b, scale):
    x, weight, lora_a, lora_b = (t.contiguous() for t in (x, weight, lora_a, lora_b))
    M, K = x.shape
    N, R = lora_b.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _lora_fwd[(triton.cdiv(M, 128), triton.cdiv(N, 128))](
        x, weight, lora_a, lora_b, y, M, N, K, R, scale, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(),
        BLOCK_R=max(16, triton.next_power_of_2(R)), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, lora_a, lora_b, scale)


# --- backward ---
@triton.jit
def _lora_low(
    LEFT, RIGHT, OUT, M, K, R, l_m, l_k, r_k, r_r, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
):
    # OUT (M, R) = LEFT (M, K) RIGHT (K, R): x A^T with A's strides, dy B with B's.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        left = tl.load(
            LEFT + m[:, None] * l_m + kk[None, :] * l_k, mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0
        )
        right = tl.load(
            RIGHT + kk[:, None] * r_k + r[None, :] * r_r, mask=(kk[:, None] < K) & (r[None, :] < R), other=0.0
        )
        acc = tl.dot(left, right, acc)
    tl.store(OUT + m[:, None] * R + r[None, :], acc, mask=(m[:, None] < M) & (r[None, :] < R))


@triton.jit
def _lora_dx(
    DY, W, DLow, A, DX, M, N, K, R, scale,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    row, col = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    m, k = row.to(tl.int64) + tl.arange(0, BLOCK_M), col.to(tl.int64) + tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    # The low-rank path is one more slice of the summed axis: (s dy B) A joins before dy W.
    low = tl.load(DLow + m[:, None] * R + r[None, :], mask=(m[:, None] < M) & (r[None, :] < R), other=0.0)
    a = tl.load(A + r[:, None] * K + k[None, :], mask=(r[:, None] < R) & (k[None, :] < K), other=0.0)
    acc = tl.dot(low, a) * scale
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DY.load([row, n]), W.load([n, col]), acc)
    tl.store(DX + m[:, None] * K + k[None, :], acc, mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def _lora_dw_parts(
    Wide, Low, Parts, M, C, R, scale, wide_m, wide_c, p_c, p_r, rows_each,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # s * Wide^T Low over the rows of one split; the strides of the part let dA come out as (R, K), dB as (N, R).
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    first = split * rows_each
    last = tl.minimum(first + rows_each, M)
    acc = tl.zeros((BLOCK_C, BLOCK_R), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        wide = tl.load(
            Wide + c[:, None] * wide_c + m[None, :] * wide_m, mask=(c[:, None] < C) & (m[None, :] < last), other=0.0
        )
        low = tl.load(Low + m[:, None] * R + r[None, :], mask=(m[:, None] < last) & (r[None, :] < R), other=0.0)
        acc = tl.dot(wide, low, acc)
    at = split * C * R + c[:, None] * p_c + r[None, :] * p_r
    tl.store(Parts + at, acc * scale, mask=(c[:, None] < C) & (r[None, :] < R))


def _low(left, right, dtype):
    M, K = left.shape
    R = right.shape[1]
    out = torch.empty(M, R, device=left.device, dtype=dtype)
    # Few rows for each program: a thin product has nothing else to fill a device with.
    BLOCK_M = max(16, min(64, triton.next_power_of_2(M) // 256))
    _lora_low[(triton.cdiv(M, BLOCK_M),)](
        left, right, out, M, K, R, left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        BLOCK_M=BLOCK_M, BLOCK_K=256 // left.element_size(), BLOCK_R=max(16, triton.next_power_of_2(R)),
        num_warps=max(2, BLOCK_M // 16), num_stages=4,
    )  # fmt: skip
    return out


def _dw(wide, low, scale, like, p_c, p_r):
    M, C = wide.shape
    R = low.shape[1]
    tiles = triton.cdiv(C, 64)
    rows_each = triton.cdiv(triton.cdiv(M, max(1, 528 // tiles)), 64) * 64
    splits = triton.cdiv(M, rows_each)
    parts = torch.empty(splits, *like.shape, device=like.device, dtype=torch.float32)
    _lora_dw_parts[(tiles, splits)](
        wide, low, parts, M, C, R, scale, wide.stride(0), wide.stride(1), p_c, p_r, rows_each,
        BLOCK_M=64, BLOCK_C=64, BLOCK_R=max(16, triton.next_power_of_2(R)), num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.sum(0).to(like.dtype)


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
    x, weight, lora_a, lora_b, scale = saved
    need_x, need_a, need_b = needs or (True, True, True)
    M, K = x.shape
    N, R = lora_b.shape
    dx = da = db = None
    if need_x or need_a:
        dlow = _low(grad_y, lora_b, x.dtype)
    if need_x:
        dx = torch.empty_like(x)
        BM, BK, BN = min(128, _up(M)), min(256, _up(K)), min(128 // x.element_size(), _up(N))
        _lora_dx[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(weight, BN, BK), dlow, lora_a, dx, M, N, K, R, scale,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, BLOCK_R=_up(R), num_warps=8, num_stages=4,
        )  # fmt: skip
    if need_a:
        da = _dw(x, dlow, scale, lora_a, 1, K)
    if need_b:
        db = _dw(grad_y, _low(x, lora_a.t(), x.dtype), scale, lora_b, R, 1)
    return dx, da, db


# --- check ---
SWEEP = (
    {"M": 160, "N": 64, "K": 32, "R": 16},
    {"M": 77, "N": 45, "K": 70, "R": 5, "dtype": "float16"},
    {"M": 48, "N": 24, "K": 40, "R": 8, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "K": 4096, "R": 16, "dtype": "bfloat16"},)


def make_args(M, N, K, R, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, K, generator=g),
        torch.randn(N, K, generator=g) * K**-0.5,
        torch.randn(R, K, generator=g) * K**-0.5,
        torch.randn(N, R, generator=g) * R**-0.5,
    )
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.5)


def reference(x, weight, lora_a, lora_b, scale):
    return x @ weight.t() + scale * ((x @ lora_a.t()) @ lora_b.t())
