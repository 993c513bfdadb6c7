"""Causal linear attention by chunks: states run forward over chunks and are saved, state gradients run back."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linattn_causal_chunk",
    "family": "linear_attention",
    "op": "linear_attention",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "recompute"),
    "saves": ("states: fp32 (B, H, chunks, K, V)",),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tile(X, base, first, T, D, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = col + tl.arange(0, COLS)
    mask = (t[:, None] < T) & (d[None, :] < D)
    return tl.load(X + (base + t[:, None]) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def _running_outer(
    A, B, Out, T, KD, VD, scale, REVERSE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Out[c] = scale * sum of a_t b_t^T over the chunks before c (after c, if REVERSE), one (K, V) tile a program.
    head = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (k[:, None] < KD) & (v[None, :] < VD)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    chunks = tl.cdiv(T, CHUNK)
    for i in range(chunks):
        c = i
        if REVERSE:
            c = chunks - 1 - i
        tl.store(Out + ((head * chunks + c) * KD + k[:, None]) * VD + v[None, :], state * scale, mask=inside)
        a = _tile(A, head * T, c * CHUNK, T, KD, tl.program_id(1) * BLOCK_K, CHUNK, BLOCK_K)
        b = _tile(B, head * T, c * CHUNK, T, VD, tl.program_id(2) * BLOCK_V, CHUNK, BLOCK_V)
        state = tl.dot(tl.trans(a), b, state)


@triton.jit
def _state_tile(States, head, c, chunks, KD, VD, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    at = ((head * chunks + c) * KD + k[:, None]) * VD + v[None, :]
    return tl.load(States + at, mask=(k[:, None] < KD) & (v[None, :] < VD), other=0.0)


@triton.jit
def _chunk_out(
    Q, K, V, States, Out, T, KD, VD, scale, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0)
    q = _tile(Q, head * T, c * CHUNK, T, KD, 0, CHUNK, BLOCK_K)
    k = _tile(K, head * T, c * CHUNK, T, KD, 0, CHUNK, BLOCK_K)
    v = _tile(V, head * T, c * CHUNK, T, VD, 0, CHUNK, BLOCK_V)
    state = _state_tile(States, head, c, tl.cdiv(T, CHUNK), KD, VD, BLOCK_K, BLOCK_V)
    i = tl.arange(0, CHUNK)
    score = tl.where(i[:, None] >= i[None, :], tl.dot(q, tl.trans(k)), 0.0) * scale
    out = tl.dot(q, state.to(q.dtype))
    out = tl.dot(score.to(v.dtype), v, out)
    t = c * CHUNK + i
    d = tl.arange(0, BLOCK_V)
    at = (head * T + t[:, None]) * VD + d[None, :]
    tl.store(Out + at, out, mask=(t[:, None] < T) & (d[None, :] < VD))


def _running_states(a, b, scale, reverse, chunk):
    """(B, H, chunks, K, V) in fp32: sums of outer products over the chunks on one side."""
    (B, H, T, KD), VD = a.shape, b.shape[-1]
    states = torch.empty(B, H, triton.cdiv(T, chunk), KD, VD, device=a.device, dtype=torch.float32)
    # A state is walked in tiles of 64 keys by 32 values: chunks follow one another, tiles side by side fill the device.
    BK, BV = (max(16, min(most, triton.next_power_of_2(size))) for size, most in ((KD, 64), (VD, 32)))
    _running_outer[(B * H, triton.cdiv(KD, BK), triton.cdiv(VD, BV))](
        a, b, states, T, KD, VD, scale, REVERSE=reverse, CHUNK=chunk, BLOCK_K=BK, BLOCK_V=BV
    )
    return states


def forward(q, k, v, chunk=None):
    # The chunk's four tiles and two states have to fit into shared memory at K = V = 128.
    chunk = chunk or 128 // q.element_size()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, KD), VD = q.shape, v.shape[-1]
    scale = KD**-0.5
    states = _running_states(k, v, scale, False, chunk)
    out = torch.empty_like(v)
    BK, BV = (max(16, triton.next_power_of_2(size)) for size in (KD, VD))
    _chunk_out[(triton.cdiv(T, chunk), B * H)](
        q,
        k,
        v,
        states,
        out,
        T,
        KD,
        VD,
        scale,
        CHUNK=chunk,
        BLOCK_K=BK,
        BLOCK_V=BV,
        num_warps=8 if BK * BV > 4096 else 4,
    )
    return out, (q, k, v, states, chunk)


# --- backward ---
@triton.jit
def _chunk_grads(
    Q, K, V, DO, States, DStates, DQ, DK, DV, T, KD, VD, scale,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # With both running states at hand, chunks are independent: each adds its own triangle to what the states carry.
    head = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0)
    chunks = tl.cdiv(T, CHUNK)
    q = _tile(Q, head * T, c * CHUNK, T, KD, 0, CHUNK, BLOCK_K)
    k = _tile(K, head * T, c * CHUNK, T, KD, 0, CHUNK, BLOCK_K)
    v = _tile(V, head * T, c * CHUNK, T, VD, 0, CHUNK, BLOCK_V)
    do = _tile(DO, head * T, c * CHUNK, T, VD, 0, CHUNK, BLOCK_V)
    state = _state_tile(States, head, c, chunks, KD, VD, BLOCK_K, BLOCK_V).to(q.dtype)
    dstate = _state_tile(DStates, head, c, chunks, KD, VD, BLOCK_K, BLOCK_V).to(q.dtype)
    i = tl.arange(0, CHUNK)
    before = i[:, None] >= i[None, :]
    ds = (tl.where(before, tl.dot(do, tl.trans(v)), 0.0) * scale).to(q.dtype)
    score_t = (tl.where(i[:, None] <= i[None, :], tl.dot(k, tl.trans(q)), 0.0) * scale).to(q.dtype)
    dq = tl.dot(ds, k, tl.dot(do, tl.trans(state)))
    dk = tl.dot(tl.trans(ds), q, tl.dot(v, tl.trans(dstate)))
    dv = tl.dot(score_t, do, tl.dot(k, dstate))
    t = c * CHUNK + i
    kd = tl.arange(0, BLOCK_K)
    vd = tl.arange(0, BLOCK_V)
    at_k = (head * T + t[:, None]) * KD + kd[None, :]
    in_k = (t[:, None] < T) & (kd[None, :] < KD)
    tl.store(DQ + at_k, dq, mask=in_k)
    tl.store(DK + at_k, dk, mask=in_k)
    tl.store(DV + (head * T + t[:, None]) * VD + vd[None, :], dv, mask=(t[:, None] < T) & (vd[None, :] < VD))


def backward(saved, grad_out, needs=None):
    q, k, v, states, chunk = saved
    (B, H, T, KD), VD = q.shape, v.shape[-1]
    do = grad_out.contiguous()
    scale = KD**-0.5
    dstates = _running_states(q, do, scale, True, chunk)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    BK, BV = (max(16, triton.next_power_of_2(size)) for size in (KD, VD))
    _chunk_grads[(triton.cdiv(T, chunk), B * H)](
        q,
        k,
        v,
        do,
        states,
        dstates,
        dq,
        dk,
        dv,
        T,
        KD,
        VD,
        scale,
        CHUNK=chunk,
        BLOCK_K=BK,
        BLOCK_V=BV,
        num_warps=8 if BK * BV > 4096 else 4,
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 16},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 20, "dtype": "bfloat16"},
    {"B": 1, "H": 1, "T": 32, "K": 16, "V": 32, "dtype": "float16"},
)
BENCH = ({"B": 8, "H": 16, "T": 2048, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    q, k, v = (torch.randn(B, H, T, size, generator=g).to(device, dt) for size in (K, K, V))
    # Short sequences have chunks of their own size; long ones those that suit the device.
    return q, k, v, 16 if T <= 256 else None


def reference(q, k, v, chunk=None):
    # Chunks of 64 tokens: dense within, running sums of k^T v between.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    added = (k.transpose(-1, -2) @ v).float()
    states = (added.cumsum(2) - added).to(q.dtype)
    out = (q @ k.transpose(-1, -2)).tril() @ v + q @ states
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T]
