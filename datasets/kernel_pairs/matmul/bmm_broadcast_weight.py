"""Batched x (B, T, K) against one weight: dW sums over batch and time inside the loop of its owner, without partials.

x may be any strided view whose batch and time axes do not merge into one, such as a slice of a longer sequence.
Forward and dX then count tiles within each batch. dW = sum over b of x[b]^T dy[b]: its loop runs over the pairs (batch,
piece of time) as one counter, so that the pipeline of loads does not drain where one batch ends and the next begins.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "bmm_broadcast_weight",
    "family": "matmul",
    "op": "batched_linear",
    "schema": 1,
    "techniques": ("broadcast-reduction", "column-owner", "owner-grid"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _shared_weight_rows(
    X, W, Y, T, N, K, x_b, x_t, x_k, w_k, w_n,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = X + batch * x_b + t[:, None] * x_t
    w_cols = W + n[None, :] * w_n
    y = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x = tl.load(x_rows + k[None, :] * x_k, mask=(t[:, None] < T) & (k[None, :] < K), other=0.0)
        w = tl.load(w_cols + k[:, None] * w_k, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        y = tl.dot(x, w, y)
    tl.store(Y + (batch * T + t[:, None]) * N + n[None, :], y, mask=(t[:, None] < T) & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def _rows_times(x, weight):
    B, T, K = x.shape
    N = weight.shape[1]
    y = torch.empty(B, T, N, device=x.device, dtype=x.dtype)
    BT, BN = _side(T), _side(N)
    _shared_weight_rows[(triton.cdiv(N, BN), triton.cdiv(T, BT), B)](
        x, weight, y, T, N, K, *x.stride(), *weight.stride(),
        BLOCK_T=BT, BLOCK_N=BN, BLOCK_K=_side(K, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y


def forward(x, weight):
    return _rows_times(x, weight), (x, weight)


# --- backward ---
@triton.jit
def _shared_weight_dx(
    DY, W, DX, T, N, K, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Tiles are counted within each batch, GROUP of them down before the next column tile.
    batch = tl.program_id(1)
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(T, BLOCK_T) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    t, k = (band * GROUP + inside % height) * BLOCK_T, inside // height * BLOCK_K
    dx = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        dy = tl.reshape(DY.load([batch, t, n]), (BLOCK_T, BLOCK_N))
        dx = tl.dot(dy, W.load([k, n]).T, dx)
    rows, cols = t + tl.arange(0, BLOCK_T), k + tl.arange(0, BLOCK_K)
    at = (batch.to(tl.int64) * T + rows[:, None]) * K + cols[None, :]
    tl.store(DX + at, dx, mask=(rows[:, None] < T) & (cols[None, :] < K))


@triton.jit
def _shared_weight_dw(
    X, DY, DW, B, T, N, K,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(K, BLOCK_K) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    k, n = (band * GROUP + inside % height) * BLOCK_K, inside // height * BLOCK_N
    pieces = tl.cdiv(T, BLOCK_T)
    dw = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for step in range(B * pieces):
        # Rows past the end of a batch read as zeros.
        batch, t = step // pieces, step % pieces * BLOCK_T
        x = tl.reshape(X.load([batch, t, k]), (BLOCK_T, BLOCK_K))
        dy = tl.reshape(DY.load([batch, t, n]), (BLOCK_T, BLOCK_N))
        dw = tl.dot(x.T, dy, dw)
    rows, cols = k.to(tl.int64) + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    tl.store(DW + rows[:, None] * N + cols[None, :], dw, mask=(rows[:, None] < K) & (cols[None, :] < N))


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


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    B, T, K = x.shape
    N = weight.shape[1]
    depth = 128 // x.element_size()
    dx = dw = None
    if needs[0]:
        dx = torch.empty(B, T, K, device=x.device, dtype=x.dtype)
        BT, BK, BN = min(128, _up(T)), min(128, _up(K)), min(depth, _up(N))
        _shared_weight_dx[(triton.cdiv(T, BT) * triton.cdiv(K, BK), B)](
            _tiles(grad_y, 1, BT, BN), _tiles(weight, BK, BN), dx, T, N, K,
            GROUP=8, BLOCK_T=BT, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if needs[1]:
        dw = torch.empty(K, N, device=weight.device, dtype=weight.dtype)
        BK, BN, BT = min(128, _up(K)), min(256, _up(N)), min(depth, _up(T))
        _shared_weight_dw[(triton.cdiv(K, BK) * triton.cdiv(N, BN),)](
            _tiles(x, 1, BT, BK), _tiles(grad_y, 1, BT, BN), dw, B, T, N, K,
            GROUP=8, BLOCK_T=BT, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"B": 3, "T": 32, "K": 48, "N": 16},
    {"B": 2, "T": 75, "K": 41, "N": 70},
    {"B": 4, "T": 20, "K": 24, "N": 136, "dtype": "bfloat16"},
    {"B": 2, "T": 40, "K": 16, "N": 30, "dtype": "float16"},
)
BENCH = ({"B": 8, "T": 2048, "K": 4096, "N": 4096, "dtype": "bfloat16"},)


def make_args(B, T, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    # The first token of every sequence is cut off: batch and time cannot be merged.
    x = torch.randn(B, T + 1, K, generator=g).to(device, dt)[:, 1:]
    return x, (torch.randn(K, N, generator=g) * K**-0.5).to(device, dt)


def reference(x, weight):
    return x @ weight
