"""Dense conv1d of three taps, channels last, as implicit products: dx flips the taps, dweight splits the time.

y[t] = sum over taps of x[t + tap - 1] W[tap], zero outside the sequence. Rows of all sequences are one long axis; a
tap is a shifted load of the same rows, masked at the sequence's ends, so that no unfolded input exists. dx is the same
kernel on dy with taps reversed and W transposed. dweight has few tiles and many rows: splits of the rows meet as fp32
partials, and a program keeps all three taps, which share each tile of dy.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv1d_dense_k3",
    "family": "conv",
    "op": "conv1d",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "owner-grid", "halo", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _conv3(
    X, Weight, Out, rows, T, K, N, x_b, x_t, x_c, w_k, w_n,
    FLIP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t = m % T
    row = X + m // T * x_b + t * x_t
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tap in tl.static_range(3):
        there = (m < rows) & (t + tap - 1 >= 0) & (t + tap - 1 < T)
        shifted = row + (tap - 1) * x_t
        w_tap = Weight + (2 - tap if FLIP else tap) * K * N
        for start in range(0, K, BLOCK_K):
            kk = start + k
            x = tl.load(shifted[:, None] + kk[None, :] * x_c, mask=there[:, None] & (kk[None, :] < K), other=0.0)
            w_at = w_tap + kk[:, None] * w_k + n[None, :] * w_n
            w = tl.load(w_at, mask=(kk[:, None] < K) & (n[None, :] < N), other=0.0)
            acc = tl.dot(x, w, acc)
    tl.store(Out + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < rows) & (n[None, :] < N))


def _convolve(x, weight, flip):
    """`weight` is (3, K, N) in any order of its last two axes."""
    B, T, K = x.shape
    N = weight.shape[2]
    out = torch.empty(B, T, N, device=x.device, dtype=x.dtype)
    _conv3[(triton.cdiv(B * T, 128), triton.cdiv(N, 128))](
        x, weight, out, B * T, T, K, N, *x.stride(), weight.stride(1), weight.stride(2),
        FLIP=flip, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight):
    weight = weight.contiguous()
    return _convolve(x, weight, flip=False), (x, weight)


# --- backward ---
@triton.jit
def _conv3_dweight(
    X, DY, Parts, rows, T, K, N, x_b, x_t, x_c, dy_b, dy_t, dy_c, rows_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tile (k, n) of all three taps over the rows of one split. Lanes of x are transposed: k is its first axis.
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2).to(tl.int64)
    first = split * rows_each
    last = tl.minimum(first + rows_each, rows)
    before = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    centre = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    after = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        t = m % T
        inside = m < last
        dy_at = DY + (m // T * dy_b + t * dy_t)[:, None] + n[None, :] * dy_c
        dy = tl.load(dy_at, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        x_at = X + (m // T * x_b + t * x_t)[None, :] + k[:, None] * x_c
        x = tl.load(x_at - x_t, mask=(inside & (t > 0))[None, :] & (k[:, None] < K), other=0.0)
        before = tl.dot(x, dy, before)
        x = tl.load(x_at, mask=inside[None, :] & (k[:, None] < K), other=0.0)
        centre = tl.dot(x, dy, centre)
        x = tl.load(x_at + x_t, mask=(inside & (t + 1 < T))[None, :] & (k[:, None] < K), other=0.0)
        after = tl.dot(x, dy, after)
    at = Parts + 3 * split * K * N + k[:, None] * N + n[None, :]
    tile = (k[:, None] < K) & (n[None, :] < N)
    tl.store(at, before, mask=tile)
    tl.store(at + K * N, centre, mask=tile)
    tl.store(at + 2 * K * N, after, mask=tile)


def backward(saved, grad_y, needs=None):
    x, weight = saved
    need_x, need_w = needs or (True, True)
    B, T, K = x.shape
    N = weight.shape[2]
    dx = _convolve(grad_y, weight.transpose(1, 2), flip=True) if need_x else None
    if not need_w:
        return dx, None
    # Two waves on 132 processors, but no split shorter than four tiles of 64 rows.
    tiles = triton.cdiv(K, 64) * triton.cdiv(N, 64)
    splits = max(1, min(triton.cdiv(B * T, 256), 264 // tiles))
    rows_each = triton.cdiv(triton.cdiv(B * T, splits), 64) * 64
    splits = triton.cdiv(B * T, rows_each)
    parts = torch.empty(splits, 3, K, N, device=x.device, dtype=torch.float32)
    _conv3_dweight[(triton.cdiv(K, 64), triton.cdiv(N, 64), splits)](
        x, grad_y, parts, B * T, T, K, N, *x.stride(), *grad_y.stride(), rows_each,
        BLOCK_M=128 // x.element_size(), BLOCK_N=64, BLOCK_K=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "T": 64, "CI": 16, "CO": 32},
    {"B": 3, "T": 93, "CI": 18, "CO": 21},
    {"B": 1, "T": 40, "CI": 32, "CO": 16, "dtype": "bfloat16"},
    {"B": 2, "T": 19, "CI": 16, "CO": 16, "dtype": "float16"},
)
BENCH = ({"B": 16, "T": 2048, "CI": 512, "CO": 512, "dtype": "bfloat16"},)


def make_args(B, T, CI, CO, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, T, CI, generator=g), torch.randn(3, CI, CO, generator=g) * (3 * CI) ** -0.5)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    return torch.nn.functional.conv1d(x.transpose(1, 2), weight.permute(2, 1, 0), padding=1).transpose(1, 2)
