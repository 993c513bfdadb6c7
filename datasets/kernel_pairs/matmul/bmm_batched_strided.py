"""Batched products of strided operands, either of which may be shared: a shared one's gradient sums over the batch.

Batches lie on a grid axis and every operand comes with its own strides; stride 0 along the batch shares it. For a plain
operand the gradient has a program per batch and tile. For a shared one a program adds its tile over a run of batches
within one accumulator, and the few runs are summed afterwards: enough runs to fill the device, no atomics.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "bmm_batched_strided",
    "family": "matmul",
    "op": "bmm",
    "schema": 1,
    "techniques": ("broadcast-reduction", "two-stage-partials", "owner-grid"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bmm_fwd(
    A, B, C, M, N, K, a_z, a_m, a_k, b_z, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_at = A + z * a_z + m[:, None] * a_m + k[None, :] * a_k
    b_at = B + z * b_z + k[:, None] * b_k + n[None, :] * b_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for left in range(K, 0, -BLOCK_K):
        a = tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        b = tl.load(b_at, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    tl.store(C + z * M * N + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _side(size):
    return max(16, min(128, triton.next_power_of_2(size)))


def forward(a, b):
    Z = max(a.shape[0], b.shape[0])
    if not {a.shape[0], b.shape[0]} <= {1, Z}:
        raise ValueError("the batches must agree, or one of them be 1")
    M, K, N = *a.shape[1:], b.shape[2]
    c = torch.empty(Z, M, N, device=a.device, dtype=a.dtype)
    wide_a, wide_b = a.expand(Z, M, K), b.expand(Z, K, N)
    BM, BN = _side(M), _side(N)
    _bmm_fwd[(triton.cdiv(N, BN), triton.cdiv(M, BM), Z)](
        a, b, c, M, N, K, *wide_a.stride(), *wide_b.stride(),
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=min(_side(K), 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return c, (a, b)


# --- backward ---
@triton.jit
def _bmm_run(
    L, R, OUT, P, Q, S, batches, run,
    TURN_L: tl.constexpr, TURN_R: tl.constexpr, ONE_L: tl.constexpr, ONE_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # One tile of the sum of L[z] R[z] over a run of batches; a run of one is the plain batched product. Batches and
    # pieces of the sum are one counter, so that the pipeline of loads does not drain between two batches.
    part = tl.program_id(2)
    p, q = tl.program_id(0) * BLOCK_P, tl.program_id(1) * BLOCK_Q
    pieces = tl.cdiv(S, BLOCK_S)
    acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for step in range(part * run * pieces, tl.minimum((part + 1) * run, batches) * pieces):
        s = step % pieces * BLOCK_S
        z_l = 0 if ONE_L else step // pieces
        z_r = 0 if ONE_R else step // pieces
        # What lies the other way round in memory is turned as a tile.
        if TURN_L:
            left = tl.reshape(L.load([z_l, s, p]), (BLOCK_S, BLOCK_P)).T
        else:
            left = tl.reshape(L.load([z_l, p, s]), (BLOCK_P, BLOCK_S))
        if TURN_R:
            right = tl.reshape(R.load([z_r, q, s]), (BLOCK_Q, BLOCK_S)).T
        else:
            right = tl.reshape(R.load([z_r, s, q]), (BLOCK_S, BLOCK_Q))
        acc = tl.dot(left, right, acc)
    rows, cols = p.to(tl.int64) + tl.arange(0, BLOCK_P), q + tl.arange(0, BLOCK_Q)
    out = OUT + part.to(tl.int64) * P * Q + rows[:, None] * Q + cols[None, :]
    tl.store(out, acc, mask=(rows[:, None] < P) & (cols[None, :] < Q))


def _turned(batch):
    """Whether the matrices of a batch lie transposed in memory."""
    return batch.stride(1) == 1 and batch.stride(2) != 1


def _tiles(batch, rows, cols):
    """A descriptor of (rows, cols) tiles as they lie in memory; of a copy where none can follow the strides."""
    block = [1, rows, cols]
    if _turned(batch):
        batch, block = batch.transpose(1, 2), [1, cols, rows]
    step, width = 16 // batch.element_size(), batch.shape[2]
    starts = (batch.stride(0), batch.stride(1), batch.storage_offset())
    if batch.stride(2) != 1 or batch.stride(1) < width or any(start % step for start in starts):
        dense = batch.new_empty(*batch.shape[:2], triton.cdiv(width, step) * step)[:, :, :width]
        dense.copy_(batch)
        batch = dense
    # A batch of one, or one matrix for all, has no stride of its own.
    strides = [batch.stride(0) or batch.shape[1] * batch.stride(1), batch.stride(1), 1]
    return TensorDescriptor(batch, list(batch.shape), strides, block)


def _up(size):
    return max(16, triton.next_power_of_2(size))


def _gradient(left, right, shape, dtype):
    Z, P, S, Q = max(left.shape[0], right.shape[0]), *left.shape[1:], right.shape[2]
    BP, BQ, BS = min(128, _up(P)), min(256, _up(Q)), min(128 // left.element_size(), _up(S))
    tiles = triton.cdiv(P, BP) * triton.cdiv(Q, BQ)
    shared = shape[0] == 1 and Z > 1
    # One wave on 132 processors is enough runs.
    run = triton.cdiv(Z, max(1, min(Z, 132 // tiles))) if shared else 1
    parts = triton.cdiv(Z, run)
    out = torch.empty(parts, P, Q, device=left.device, dtype=torch.float32 if parts != shape[0] else dtype)
    _bmm_run[(triton.cdiv(P, BP), triton.cdiv(Q, BQ), parts)](
        _tiles(left, BP, BS), _tiles(right, BS, BQ), out, P, Q, S, Z, run, TURN_L=_turned(left), TURN_R=_turned(right),
        ONE_L=left.shape[0] == 1, ONE_R=right.shape[0] == 1,
        BLOCK_P=BP, BLOCK_Q=BQ, BLOCK_S=BS, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out.sum(0, keepdim=True).to(dtype) if parts != shape[0] else out


def backward(saved, grad_c, needs=(True, True)):
    a, b = saved
    da = _gradient(grad_c, b.transpose(1, 2), a.shape, a.dtype) if needs[0] else None
    db = _gradient(a.transpose(1, 2), grad_c, b.shape, b.dtype) if needs[1] else None
    return da, db


# --- check ---
SWEEP = (
    {"Z": 3, "M": 32, "N": 48, "K": 16, "shared": "none"},
    {"Z": 5, "M": 37, "N": 29, "K": 41, "shared": "a"},
    {"Z": 4, "M": 20, "N": 75, "K": 24, "shared": "b", "dtype": "bfloat16"},
    {"Z": 2, "M": 16, "N": 17, "K": 40, "shared": "none", "dtype": "float16"},
)
BENCH = ({"Z": 64, "M": 2048, "N": 1024, "K": 1024, "shared": "b", "dtype": "bfloat16"},)


def make_args(Z, M, N, K, shared, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    # Heads inside the rows, as attention lays them out: neither operand is contiguous.
    a = torch.randn(M, 1 if shared == "a" else Z, K, generator=g).to(device, dt).transpose(0, 1)
    b = torch.randn(1 if shared == "b" else Z, N, K, generator=g).to(device, dt).transpose(1, 2)
    return a, b


def reference(a, b):
    return a @ b
