"""Each sequence of a jagged batch times its own matrix: dW has one owner per (sequence, tile), who loops its rows.

y[r] = x[r] W[s] for the rows r of sequence s. The same row kernel gives y and, with W read transposed, dx. Row tiles of
a sequence are dealt to a fixed number of programs in turn, so that lengths are never needed on the host.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "jagged_dense_bmm",
    "family": "jagged_segment",
    "op": "jagged_bmm",
    "schema": 1,
    "techniques": ("varlen", "owner-grid", "loop-swap", "strided-cotangent"),
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
def _own_weight_bwd(
    X, DY, DW, Offsets, N, K, x_r, x_k, dy_r, dy_n,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # A sequence without rows runs no step and leaves its zeros.
    tiles = tl.cdiv(N, BLOCK_N)
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(tl.load(Offsets + sequence).to(tl.int64), end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        xt = tl.load(X + k[:, None] * x_k + r[None, :] * x_r, mask=(k[:, None] < K) & (r[None, :] < end), other=0.0)
        dy = tl.load(DY + r[:, None] * dy_r + n[None, :] * dy_n, mask=(r[:, None] < end) & (n[None, :] < N), other=0.0)
        acc = tl.dot(xt, dy, acc)
    at = (sequence * K + k[:, None]) * N + n[None, :]
    tl.store(DW + at, acc, mask=(k[:, None] < K) & (n[None, :] < N))


def backward(saved, grad_y, needs=(True, True)):
    x, weight, offsets = saved
    sequences, K, N = weight.shape
    dx = _by_sequence(grad_y, weight.transpose(1, 2), offsets) if needs[0] else None
    dw = None
    if needs[1]:
        dw = torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)
        block = 128 if min(K, N) >= 128 else 64
        _own_weight_bwd[(sequences * triton.cdiv(N, block), triton.cdiv(K, block))](
            x, grad_y, dw, offsets, N, K, *x.stride(), *grad_y.stride(),
            BLOCK_R=128 // x.element_size(), BLOCK_N=block, BLOCK_K=block, num_warps=4,
            num_stages=3,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"S": 3, "L": 256, "K": 32, "N": 64},
    {"S": 5, "L": 407, "K": 21, "N": 71},
    {"S": 2, "L": 96, "K": 40, "N": 24, "dtype": "bfloat16"},
)
BENCH = ({"S": 64, "L": 65536, "K": 512, "N": 512, "dtype": "bfloat16"},)


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
