"""DoRA's weight m * V / ||V|| with V = W + s B A: the norm's gradient and the low-rank update in one read of each row.

With G the cotangent and t = <G, V> / ||V||^2 of a row, dV = (m / ||V||) (G - t V). dB = s dV A^T does not wait for t:
G A^T and V A^T are both accumulated while the row passes, and combined at its end, where t is known. dA = s B^T dV sums
over rows, so its programs own columns. V is never stored, every tile rebuilds it from W and the thin factors.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dora_colnorm",
    "family": "low_rank",
    "op": "dora_weight",
    "schema": 1,
    "techniques": (
        "partial-gradient", "recompute", "saved-statistics", "split-k", "two-stage-partials", "strided-cotangent",
    ),
    "saves": ("norm: fp32 (N,)",),
    "grads": ("lora_a", "lora_b", "magnitude"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "248 bytes once a row of tiles; 64 rows in 4 warps were the fastest of twelve settings on an H200",
}  # fmt: skip


# --- forward ---
@triton.jit
def _direction(W, A, b, n, k, N, K, R, scale, BLOCK_R: tl.constexpr):
    """A tile of V = W + scale B A for the rows whose B is `b`, and the tile of A, (BLOCK_R, columns)."""
    r = tl.arange(0, BLOCK_R)
    ok = (n[:, None] < N) & (k[None, :] < K)
    w = tl.load(W + n[:, None].to(tl.int64) * K + k[None, :], mask=ok, other=0.0).to(tl.float32)
    a = tl.load(A + r[:, None] * K + k[None, :], mask=(r[:, None] < R) & (k[None, :] < K), other=0.0)
    return w + tl.dot(b, a) * scale, a


@triton.jit
def _dora_fwd(
    W, A, B, Magnitude, Out, Norm, N, K, R, scale, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    b = tl.load(B + n[:, None] * R + r[None, :], mask=(n[:, None] < N) & (r[None, :] < R), other=0.0)
    squares = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        v, _ = _direction(W, A, b, n, start + tl.arange(0, BLOCK_K), N, K, R, scale, BLOCK_R)
        squares += v * v
    norm = tl.sqrt(tl.sum(squares, 1))
    tl.store(Norm + n, norm, mask=n < N)
    # Rows past N have norm 0 and are not stored.
    gain = tl.load(Magnitude + n, mask=n < N, other=0.0).to(tl.float32) / tl.where(n < N, norm, 1.0)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        v, _ = _direction(W, A, b, n, k, N, K, R, scale, BLOCK_R)
        ok = (n[:, None] < N) & (k[None, :] < K)
        tl.store(Out + n[:, None].to(tl.int64) * K + k[None, :], gain[:, None] * v, mask=ok)


def _columns(K, most=256):
    """Columns of a step along a row: wide ones, for each step waits for small products, one after another."""
    return max(64, min(most, triton.next_power_of_2(K) // 2))


def forward(weight, lora_a, lora_b, magnitude, scale):
    weight, lora_a, lora_b = weight.contiguous(), lora_a.contiguous(), lora_b.contiguous()
    N, K = weight.shape
    R = lora_a.shape[0]
    out = torch.empty_like(weight)
    norm = torch.empty(N, device=weight.device, dtype=torch.float32)
    # Sixteen rows, the least a product takes, so that rows alone fill the device.
    _dora_fwd[(triton.cdiv(N, 16),)](
        weight, lora_a, lora_b, magnitude, out, norm, N, K, R, scale,
        BLOCK_N=16, BLOCK_K=_columns(K), BLOCK_R=max(16, triton.next_power_of_2(R)), num_warps=4,
    )  # fmt: skip
    return out, (weight, lora_a, lora_b, magnitude, norm, scale)


# --- backward ---
@triton.jit
def _dora_rows(
    G, W, A, B, Magnitude, Norm, DB, DM, T, N, K, R, scale, g_n, g_k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    b_at = n[:, None] * R + r[None, :]
    b_ok = (n[:, None] < N) & (r[None, :] < R)
    b = tl.load(B + b_at, mask=b_ok, other=0.0)
    along = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ga = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    va = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        v, a = _direction(W, A, b, n, k, N, K, R, scale, BLOCK_R)
        g_at = n[:, None].to(tl.int64) * g_n + k[None, :].to(tl.int64) * g_k
        g = tl.load(G + g_at, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
        along += g.to(tl.float32) * v
        ga = tl.dot(g, tl.trans(a), ga)
        va = tl.dot(v.to(a.dtype), tl.trans(a), va)
    norm = tl.load(Norm + n, mask=n < N, other=1.0)
    dot = tl.sum(along, 1)
    t = dot / (norm * norm)
    tl.store(T + n, t, mask=n < N)
    tl.store(DM + n, dot / norm, mask=n < N)
    gain = scale * tl.load(Magnitude + n, mask=n < N, other=0.0).to(tl.float32) / norm
    tl.store(DB + b_at, gain[:, None] * (ga - t[:, None] * va), mask=b_ok)


@triton.jit
def _dora_columns(
    G, W, A, B, Magnitude, Norm, T, Parts, N, K, R, scale, g_n, g_k, rows_each,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # s B^T dV for a tile of columns, over one split of the rows; the row's factor m / ||V|| goes to B, which is thin.
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    split = tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    last = tl.minimum((split + 1) * rows_each, N)
    acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for start in range(split * rows_each, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        b = tl.load(B + n[:, None] * R + r[None, :], mask=(n[:, None] < last) & (r[None, :] < R), other=0.0)
        v, _ = _direction(W, A, b, n, k, last, K, R, scale, BLOCK_R)
        g_at = n[:, None].to(tl.int64) * g_n + k[None, :].to(tl.int64) * g_k
        g = tl.load(G + g_at, mask=(n[:, None] < last) & (k[None, :] < K), other=0.0).to(tl.float32)
        g -= tl.load(T + n, mask=n < last, other=0.0)[:, None] * v
        norm = tl.load(Norm + n, mask=n < last, other=1.0)
        gain = scale * tl.load(Magnitude + n, mask=n < last, other=0.0).to(tl.float32) / norm
        scaled = (b.to(tl.float32) * gain[:, None]).to(b.dtype)
        acc = tl.dot(tl.trans(scaled), g.to(b.dtype), acc)
    at = (split * R + r[:, None]) * K + k[None, :]
    tl.store(Parts + at, acc, mask=(r[:, None] < R) & (k[None, :] < K))


def backward(saved, grad_out, needs=None):
    weight, lora_a, lora_b, magnitude, norm, scale = saved
    N, K = weight.shape
    R = lora_a.shape[0]
    rank = max(16, triton.next_power_of_2(R))
    db, dm = torch.empty_like(lora_b), torch.empty_like(magnitude)
    t = torch.empty_like(norm)
    _dora_rows[(triton.cdiv(N, 64),)](
        grad_out, weight, lora_a, lora_b, magnitude, norm, db, dm, t, N, K, R, scale,
        grad_out.stride(0), grad_out.stride(1), BLOCK_N=64, BLOCK_K=_columns(K, 128), BLOCK_R=rank,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    if needs is not None and not needs[0]:
        return None, db, dm
    # Four programs for each of 132 processors, whole blocks of 32 rows for each.
    tiles = triton.cdiv(K, 128)
    rows_each = triton.cdiv(triton.cdiv(N, max(1, 528 // tiles)), 32) * 32
    splits = triton.cdiv(N, rows_each)
    parts = torch.empty(splits, R, K, device=weight.device, dtype=torch.float32)
    _dora_columns[(tiles, splits)](
        grad_out, weight, lora_a, lora_b, magnitude, norm, t, parts, N, K, R, scale,
        grad_out.stride(0), grad_out.stride(1), rows_each, BLOCK_N=32, BLOCK_K=128, BLOCK_R=rank, num_warps=4,
    )  # fmt: skip
    return parts.sum(0).to(lora_a.dtype), db, dm


# --- check ---
SWEEP = (
    {"N": 32, "K": 128, "R": 16},
    {"N": 45, "K": 151, "R": 5, "dtype": "float16"},
    {"N": 24, "K": 96, "R": 8, "dtype": "bfloat16"},
)
BENCH = ({"N": 8192, "K": 8192, "R": 16, "dtype": "bfloat16"},)


def make_args(N, K, R, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(N, K, generator=g) * K**-0.5,
        torch.randn(R, K, generator=g) * K**-0.5,
        torch.randn(N, R, generator=g) * R**-0.5,
        torch.rand(N, generator=g) + 0.5,
    )
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.5)


def reference(weight, lora_a, lora_b, magnitude, scale):
    v = weight.float() + scale * (lora_b @ lora_a).float()
    norm = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    return (magnitude.float()[:, None] * v / norm).to(weight.dtype)
