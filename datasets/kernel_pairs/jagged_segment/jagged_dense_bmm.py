"""Each sequence of a jagged batch times its own matrix: dW has one owner per (sequence, tile), who loops its rows.

y[r] = x[r] W[s] for the rows r of sequence s. For dx, W is read transposed. Row tiles of
a sequence are dealt to a fixed number of programs in turn, so that lengths are never needed on the host.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "jagged_dense_bmm",
    "family": "jagged_segment",
    "op": "jagged_bmm",
    "schema": 1,
    "techniques": ("varlen", "owner-grid", "loop-swap"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rows_times_own(
    X, W, Y, Offsets, N, K, x_r, x_k, w_s, w_k, w_n,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Sequences, of which there may be very many, share the first axis with their column tiles.
    tiles = tl.cdiv(N, BLOCK_N)
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    begin = tl.load(Offsets + sequence).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    for start in range(begin + tl.program_id(1) * BLOCK_R, end, tl.num_programs(1) * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K).to(tl.int64)
            x_at = X + r[:, None] * x_r + k[None, :] * x_k
            w_at = W + sequence * w_s + k[:, None] * w_k + n[None, :] * w_n
            x = tl.load(x_at, mask=(r[:, None] < end) & (k[None, :] < K), other=0.0)
            w = tl.load(w_at, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
            acc = tl.dot(x, w, acc)
        tl.store(Y + r[:, None] * N + n[None, :], acc, mask=(r[:, None] < end) & (n[None, :] < N))


def _by_sequence(x, weight, offsets):
    """Row r of x times weight[s], for any strides of both."""
    rows, K = x.shape
    sequences, _, N = weight.shape
    y = torch.empty(rows, N, device=x.device, dtype=x.dtype)
    # Twice as many programs as a sequence of average length has tiles.
    share = max(1, triton.cdiv(2 * rows, sequences * 128))
    _rows_times_own[(sequences * triton.cdiv(N, 64), share)](
        x, weight, y, offsets, N, K, *x.stride(), *weight.stride(),
        BLOCK_R=128, BLOCK_N=64, BLOCK_K=128 // x.element_size(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def forward(x, weight, offsets):
    """x (L, K), weight (S, K, N); sequence s is rows offsets[s] to offsets[s + 1]."""
    return _by_sequence(x, weight, offsets), (x, weight, offsets)


# --- backward ---
@triton.jit
def _own_weight_dx(DY, W, DX, Offsets, N, K, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Sequences, of which there may be very many, share the first axis with their column tiles.
    tiles = tl.cdiv(K, BLOCK_K)
    k = tl.program_id(0) % tiles * BLOCK_K
    sequence = tl.program_id(0) // tiles
    begin = tl.load(Offsets + sequence).to(tl.int32)
    end = tl.load(Offsets + sequence + 1).to(tl.int32)
    for r in range(begin + tl.program_id(1) * BLOCK_R, end, tl.num_programs(1) * BLOCK_R):
        acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        # Rows of the next sequence are read past `end`, and not stored.
        for n in range(0, N, BLOCK_N):
            w = tl.reshape(W.load([sequence, k, n]), (BLOCK_K, BLOCK_N))
            acc = tl.dot(DY.load([r, n]), w.T, acc)
        rows, cols = r.to(tl.int64) + tl.arange(0, BLOCK_R), k + tl.arange(0, BLOCK_K)
        tl.store(DX + rows[:, None] * K + cols[None, :], acc, mask=(rows[:, None] < end) & (cols[None, :] < K))


@triton.jit
def _own_weight_bwd(X, DY, DW, Offsets, N, K, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # A sequence without rows runs no step and leaves its zeros.
    tiles = tl.cdiv(N, BLOCK_N)
    n, k = tl.program_id(0) % tiles * BLOCK_N, tl.program_id(1) * BLOCK_K
    sequence = tl.program_id(0) // tiles
    begin = tl.load(Offsets + sequence).to(tl.int32)
    end = tl.load(Offsets + sequence + 1).to(tl.int32)
    whole = begin + (end - begin) // BLOCK_R * BLOCK_R
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for r in range(begin, whole, BLOCK_R):
        acc = tl.dot(X.load([r, k]).T, DY.load([r, n]), acc)
    if whole < end:
        # The last step shares its rows with the next sequence, whose rows are cleared in both operands.
        own = (whole + tl.arange(0, BLOCK_R))[:, None] < end
        x = tl.where(own, X.load([whole, k]), 0.0)
        acc = tl.dot(x.T, tl.where(own, DY.load([whole, n]), 0.0), acc)
    rows, cols = k + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    at = (sequence.to(tl.int64) * K + rows[:, None]) * N + cols[None, :]
    tl.store(DW + at, acc, mask=(rows[:, None] < K) & (cols[None, :] < N))


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
    x, weight, offsets = saved
    L, (sequences, K, N) = x.shape[0], weight.shape
    step = 128 // x.element_size()
    dx = dw = None
    if needs[0]:
        dx = torch.empty(L, K, device=x.device, dtype=x.dtype)
        BR, BK, BN = min(256, _up(L // sequences)), min(128, _up(K)), min(step, _up(N))
        # Twice as many programs as a sequence of average length has tiles.
        share = max(1, triton.cdiv(2 * L, sequences * BR))
        _own_weight_dx[(sequences * triton.cdiv(K, BK), share)](
            _tiles(grad_y, BR, BN), _tiles(weight, 1, BK, BN), dx, offsets, N, K,
            BLOCK_R=BR, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if needs[1]:
        dw = torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)
        BK, BN, BR = min(128, _up(K)), min(256, _up(N)), min(step, _up(L // sequences))
        _own_weight_bwd[(sequences * triton.cdiv(N, BN), triton.cdiv(K, BK))](
            _tiles(x, BR, BK), _tiles(grad_y, BR, BN), dw, offsets, N, K,
            BLOCK_R=BR, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"S": 3, "L": 256, "K": 32, "N": 64},
    {"S": 5, "L": 407, "K": 21, "N": 71},
    {"S": 2, "L": 96, "K": 40, "N": 24, "dtype": "bfloat16"},
)
BENCH = ({"S": 64, "L": 131072, "K": 1024, "N": 1024, "dtype": "bfloat16"},)


def make_args(S, L, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(L, K, generator=g), torch.randn(S, K, N, generator=g) * K**-0.5
    # The second sequence is empty.
    cuts = torch.randint(0, L + 1, (S - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L])))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight)), offsets.to(device)


def reference(x, weight, offsets):
    parts = x.split(offsets.diff().tolist())
    return torch.cat([part @ own for part, own in zip(parts, weight, strict=True)])
