"""Batched x (B, T, K) against one weight: dW sums over batch and time inside the loop of its owner, without partials.

x may be any strided view whose batch and time axes do not merge into one, such as a slice of a longer sequence.
Forward and dX then count tiles within each batch. dW = sum over b of x[b]^T dy[b]: its loop runs over the pairs (batch,
piece of time) as one counter, so that the pipeline of loads does not drain where one batch ends and the next begins.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bmm_broadcast_weight",
    "family": "matmul",
    "op": "batched_linear",
    "schema": 1,
    "techniques": ("broadcast-reduction", "column-owner", "owner-grid", "strided-cotangent"),
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
def _shared_weight_dw(
    X, DY, DW, B, T, N, K, x_b, x_t, x_k, dy_b, dy_t, dy_n,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_cols = X + k[:, None] * x_k
    dy_cols = DY + n[None, :] * dy_n
    pieces = tl.cdiv(T, BLOCK_T)
    dw = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for step in range(B * pieces):
        batch = (step // pieces).to(tl.int64)
        t = ((step % pieces) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        xt = tl.load(x_cols + batch * x_b + t[None, :] * x_t, mask=(k[:, None] < K) & (t[None, :] < T), other=0.0)
        dy = tl.load(dy_cols + batch * dy_b + t[:, None] * dy_t, mask=(t[:, None] < T) & (n[None, :] < N), other=0.0)
        dw = tl.dot(xt, dy, dw)
    tl.store(DW + k[:, None] * N + n[None, :], dw, mask=(k[:, None] < K) & (n[None, :] < N))


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    B, T, K = x.shape
    N = weight.shape[1]
    dx = _rows_times(grad_y, weight.t()) if needs[0] else None
    dw = None
    if needs[1]:
        dw = torch.empty(K, N, device=weight.device, dtype=weight.dtype)
        # Tiles of 64 give a small weight four times the owners, each of which walks over every row.
        most = 128 if triton.cdiv(K, 128) * triton.cdiv(N, 128) >= 132 else 64
        BK, BN = _side(K, most), _side(N, most)
        _shared_weight_dw[(triton.cdiv(N, BN), triton.cdiv(K, BK))](
            x, grad_y, dw, B, T, N, K, *x.stride(), *grad_y.stride(),
            BLOCK_T=_side(T, 128 // x.element_size()), BLOCK_N=BN, BLOCK_K=BK,
            num_warps=8 if most == 128 else 4, num_stages=4,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"B": 3, "T": 32, "K": 48, "N": 16},
    {"B": 2, "T": 75, "K": 41, "N": 70},
    {"B": 4, "T": 20, "K": 24, "N": 136, "dtype": "bfloat16"},
    {"B": 2, "T": 40, "K": 16, "N": 30, "dtype": "float16"},
)
BENCH = ({"B": 8, "T": 2048, "K": 2048, "N": 2048, "dtype": "bfloat16"},)


def make_args(B, T, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    # The first token of every sequence is cut off: batch and time cannot be merged.
    x = torch.randn(B, T + 1, K, generator=g).to(device, dt)[:, 1:]
    return x, (torch.randn(K, N, generator=g) * K**-0.5).to(device, dt)


def reference(x, weight):
    return x @ weight
