"""Dense conv1d of three taps, channels last, as implicit products: dx flips the taps, dweight splits the time.

y[t] = sum over taps of x[t + tap - 1] W[tap], zero outside the sequence. A tap is a shifted load of the same rows, zero
past the sequence's ends, so that no unfolded input exists. dx is the same sum over dy with taps reversed and W
transposed. dweight has few tiles and many rows: splits of the rows meet as fp32 partials, and the three taps of a tile
are neighbours in the grid, which find dy in the cache.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "conv1d_dense_k3",
    "family": "conv",
    "op": "conv1d",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "owner-grid", "halo"),
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
def _conv3_dx(DY, Weight, DX, T, K, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Row t of dx takes dy[t + 1 - tap] by tap. Rows before the first and after the last of a sequence read as zeros.
    t, k = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_K
    sequence = tl.program_id(2)
    pieces = tl.cdiv(N, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for step in range(3 * pieces):
        tap, n = step // pieces, step % pieces * BLOCK_N
        dy = tl.reshape(DY.load([sequence, t + 1 - tap, n]), (BLOCK_M, BLOCK_N))
        acc = tl.dot(dy, tl.reshape(Weight.load([tap, k, n]), (BLOCK_K, BLOCK_N)).T, acc)
    rows, cols = t + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    at = (sequence.to(tl.int64) * T + rows[:, None]) * K + cols[None, :]
    tl.store(DX + at, acc, mask=(rows[:, None] < T) & (cols[None, :] < K))


@triton.jit
def _conv3_dweight(
    X, DY, Parts, T, K, N, steps, each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Tile (k, n) of one tap over one run of steps; the steps of all sequences are one line.
    tiles_k = tl.cdiv(K, BLOCK_K)
    tap = tl.program_id(0) // tiles_k
    k, n = tl.program_id(0) % tiles_k * BLOCK_K, tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    pieces = tl.cdiv(T, BLOCK_M)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for step in range(split * each, tl.minimum((split + 1) * each, steps)):
        sequence, t = step // pieces, step % pieces * BLOCK_M
        xt = tl.reshape(X.load([sequence, t + tap - 1, k]), (BLOCK_M, BLOCK_K)).T
        acc = tl.dot(xt, tl.reshape(DY.load([sequence, t, n]), (BLOCK_M, BLOCK_N)), acc)
    rows, cols = k + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    at = ((3 * split + tap).to(tl.int64) * K + rows[:, None]) * N + cols[None, :]
    tl.store(Parts + at, acc, mask=(rows[:, None] < K) & (cols[None, :] < N))


def _tiles(tensor, *block):
    """A descriptor of tiles of a matrix, or of the matrices of a batch; of a copy where rows are not aligned."""
    step = 16 // tensor.element_size()
    width = tensor.shape[-1]
    outer = tensor.stride()[:-1]
    if tensor.stride(-1) != 1 or any(s % step or s < width for s in outer) or tensor.storage_offset() % step:
        dense = tensor.new_empty(*tensor.shape[:-1], triton.cdiv(width, step) * step)[..., :width]
        dense.copy_(tensor)
        tensor = dense
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    x, weight = saved
    need_x, need_w = needs or (True, True)
    (B, T, K), N = x.shape, weight.shape[2]
    depth = 128 // x.element_size()
    dx = dweight = None
    if need_x:
        dx = torch.empty(B, T, K, device=x.device, dtype=x.dtype)
        BM, BK, BN = min(256, _up(T)), min(128, _up(K)), min(depth, _up(N))
        _conv3_dx[(triton.cdiv(T, BM), triton.cdiv(K, BK), B)](
            _tiles(grad_y, 1, BM, BN), _tiles(weight, 1, BK, BN), dx, T, K, N,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if need_w:
        BK, BN, BM = min(128, _up(K)), min(256, _up(N)), min(depth, _up(T))
        tiles_k, tiles_n = triton.cdiv(K, BK), triton.cdiv(N, BN)
        # One wave on 132 processors, but no split shorter than four steps.
        steps = B * triton.cdiv(T, BM)
        splits = max(1, min(triton.cdiv(steps, 4), 132 // (3 * tiles_k * tiles_n)))
        each = triton.cdiv(steps, splits)
        splits = triton.cdiv(steps, each)
        parts = torch.empty(splits, 3, K, N, device=x.device, dtype=torch.float32)
        _conv3_dweight[(3 * tiles_k, tiles_n, splits)](
            _tiles(x, 1, BM, BK), _tiles(grad_y, 1, BM, BN), parts, T, K, N, steps, each,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "T": 64, "CI": 16, "CO": 32},
    {"B": 3, "T": 93, "CI": 18, "CO": 21},
    {"B": 1, "T": 40, "CI": 32, "CO": 16, "dtype": "bfloat16"},
    {"B": 2, "T": 19, "CI": 16, "CO": 16, "dtype": "float16"},
)
BENCH = ({"B": 16, "T": 4096, "CI": 1024, "CO": 1024, "dtype": "bfloat16"},)


def make_args(B, T, CI, CO, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, T, CI, generator=g), torch.randn(3, CI, CO, generator=g) * (3 * CI) ** -0.5)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    return torch.nn.functional.conv1d(x.transpose(1, 2), weight.permute(2, 1, 0), padding=1).transpose(1, 2)
