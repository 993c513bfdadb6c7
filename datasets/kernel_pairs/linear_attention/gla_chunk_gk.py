"""Gated linear attention by chunks, one log gate per key channel; the gates' gradient is a sum within each chunk.

    o_t = scale q_t S_t,    S_t = diag(exp(g_t)) S_(t - 1) + k_t v_t^T

With b the running sum of g from its chunk's begin, q exp(b) and k exp(-b) turn a chunk into plain products. Only
differences b_i - b_j enter the output, hence db_t = q_t dq_t - k_t dk_t in every channel, and dg is the sum of db over
all later tokens. That sum is not run over the sequence, along which it would collect rounding: at a chunk's end it is
the inner product of the passing state with its gradient, row by row, and only the chunk's own tokens are added to it.
exp(-b) is bounded as long as a chunk's gates sum to no less than about -80 (GLA divides its gates by 16).
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gla_chunk_gk",
    "family": "linear_attention",
    "op": "gated_linear_attention",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "recompute", "closed-form"),
    "saves": ("states: fp32 (B, H, chunks, K, V)",),
    "grads": ("q", "k", "v", "g"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _chunk_tile(X, head, chunk, T, D, first_col, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    d = first_col + tl.arange(0, BLOCK)
    return tl.load(X + (head * T + t[:, None]) * D + d[None, :], mask=(t[:, None] < T) & (d[None, :] < D), other=0.0)


@triton.jit
def _gated_states(
    A, B, G, States, T, DK, DV, scale, FROM_END: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # What the chunks before hand to each chunk: sums of (gated k) v^T; FROM_END: of (gated q) do^T, for its gradient.
    head = tl.program_id(2).to(tl.int64)
    first_k, first_v = tl.program_id(0) * BLOCK_K, tl.program_id(1) * BLOCK_V
    i = first_k + tl.arange(0, BLOCK_K)
    j = first_v + tl.arange(0, BLOCK_V)
    in_state = (i[:, None] < DK) & (j[None, :] < DV)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    chunks = tl.cdiv(T, CHUNK)
    for step in range(chunks):
        chunk = step
        if FROM_END:
            chunk = chunks - 1 - step
        tl.store(States + ((head * chunks + chunk) * DK + i[:, None]) * DV + j[None, :], state, mask=in_state)
        a = _chunk_tile(A, head, chunk, T, DK, first_k, CHUNK, BLOCK_K).to(tl.float32)
        b = _chunk_tile(B, head, chunk, T, DV, first_v, CHUNK, BLOCK_V)
        # Tokens past T have gate 0 and keep the sum as it is.
        g = _chunk_tile(G, head, chunk, T, DK, first_k, CHUNK, BLOCK_K).to(tl.float32)
        total = tl.sum(g, 0)
        if FROM_END:
            a *= tl.exp(tl.cumsum(g, 0)) * scale
        else:
            a *= tl.exp(total[None, :] - tl.cumsum(g, 0))
        state = tl.dot(tl.trans(a.to(b.dtype)), b, state * tl.exp(total)[:, None])


@triton.jit
def _gla_out(
    Q, K, V, G, States, Out, T, DK, DV, scale, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    chunk = tl.program_id(0)
    first_v = tl.program_id(1) * BLOCK_V
    head = tl.program_id(2).to(tl.int64)
    q = _chunk_tile(Q, head, chunk, T, DK, 0, CHUNK, BLOCK_K)
    k = _chunk_tile(K, head, chunk, T, DK, 0, CHUNK, BLOCK_K)
    v = _chunk_tile(V, head, chunk, T, DV, first_v, CHUNK, BLOCK_V)
    b = tl.cumsum(_chunk_tile(G, head, chunk, T, DK, 0, CHUNK, BLOCK_K).to(tl.float32), 0)
    q_gated = (q * tl.exp(b) * scale).to(q.dtype)
    k_gated = (k * tl.exp(-b)).to(k.dtype)
    i = tl.arange(0, CHUNK)
    scores = tl.where(i[:, None] >= i[None, :], tl.dot(q_gated, tl.trans(k_gated)), 0.0)
    c = tl.arange(0, BLOCK_K)
    e = first_v + tl.arange(0, BLOCK_V)
    at = ((head * tl.num_programs(0) + chunk) * DK + c[:, None]) * DV + e[None, :]
    state = tl.load(States + at, mask=(c[:, None] < DK) & (e[None, :] < DV), other=0.0)
    out = tl.dot(scores.to(v.dtype), v, tl.dot(q_gated, state.to(q.dtype)))
    t = chunk * CHUNK + i
    tl.store(Out + (head * T + t[:, None]) * DV + e[None, :], out, mask=(t[:, None] < T) & (e[None, :] < DV))


def _blocks(q, v):
    """(CHUNK, BLOCK_K, BLOCK_V): whole key channels, value channels in tiles of at most 64."""
    chunk = 16 if q.shape[2] <= 256 else 128 // q.element_size()
    return chunk, max(16, triton.next_power_of_2(q.shape[3])), min(64, max(16, triton.next_power_of_2(v.shape[3])))


def _running_states(a, b, g, scale, from_end):
    (B, H, T, DK), DV = a.shape, b.shape[3]
    CHUNK, BLOCK_K, BLOCK_V = _blocks(a, b)
    BLOCK_K = min(64, BLOCK_K)
    states = torch.empty(B, H, triton.cdiv(T, CHUNK), DK, DV, device=a.device, dtype=torch.float32)
    _gated_states[(triton.cdiv(DK, BLOCK_K), triton.cdiv(DV, BLOCK_V), B * H)](
        a, b, g, states, T, DK, DV, scale, FROM_END=from_end,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4, num_stages=2,
    )  # fmt: skip
    return states


def forward(q, k, v, g):
    q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    states = _running_states(k, v, g, 1.0, from_end=False)
    out = torch.empty_like(v)
    CHUNK, BLOCK_K, BLOCK_V = _blocks(q, v)
    _gla_out[(triton.cdiv(T, CHUNK), triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, g, states, out, T, DK, DV, DK**-0.5, CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4
    )
    return out, (q, k, v, g, states)


# --- backward ---
@triton.jit
def _gla_grads(
    Q, K, V, G, DO, States, DStates, DQ, DKey, DVal, DG, T, DK, DV, scale, NEED_G: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    q = _chunk_tile(Q, head, chunk, T, DK, 0, CHUNK, BLOCK_K)
    k = _chunk_tile(K, head, chunk, T, DK, 0, CHUNK, BLOCK_K)
    g = _chunk_tile(G, head, chunk, T, DK, 0, CHUNK, BLOCK_K).to(tl.float32)
    b = tl.cumsum(g, 0)
    to_end = tl.exp(tl.sum(g, 0)[None, :] - b)
    q_gated = (q * tl.exp(b) * scale).to(q.dtype)
    k_gated = (k * tl.exp(-b)).to(k.dtype)
    k_ending = (k * to_end).to(k.dtype)
    i = tl.arange(0, CHUNK)
    lower = i[:, None] >= i[None, :]
    scores = tl.where(lower, tl.dot(q_gated, tl.trans(k_gated)), 0.0).to(q.dtype)
    t = chunk * CHUNK + i
    c = tl.arange(0, BLOCK_K)
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
    dq = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    through = tl.zeros((BLOCK_K,), tl.float32)
    for first_v in range(0, DV, BLOCK_V):
        v = _chunk_tile(V, head, chunk, T, DV, first_v, CHUNK, BLOCK_V)
        do = _chunk_tile(DO, head, chunk, T, DV, first_v, CHUNK, BLOCK_V)
        e = first_v + tl.arange(0, BLOCK_V)
        at = ((head * tl.num_programs(0) + chunk) * DK + c[:, None]) * DV + e[None, :]
        in_state = (c[:, None] < DK) & (e[None, :] < DV)
        state = tl.load(States + at, mask=in_state, other=0.0)
        dstate = tl.load(DStates + at, mask=in_state, other=0.0)
        if NEED_G:
            through += tl.sum(state * dstate, 1)
        state = state.to(q.dtype)
        dstate = dstate.to(q.dtype)
        dscores = tl.dot(do, tl.trans(v), dscores)
        dq = tl.dot(do, tl.trans(state), dq)
        dk = tl.dot(v, tl.trans(dstate), dk)
        dv = tl.dot(tl.trans(scores), do, tl.dot(k_ending, dstate))
        in_v = (t[:, None] < T) & (e[None, :] < DV)
        tl.store(DVal + (head * T + t[:, None]) * DV + e[None, :], dv, mask=in_v)
    dscores = tl.where(lower, dscores, 0.0).to(q.dtype)
    dq_within = tl.dot(dscores, k_gated)
    dk_within = tl.dot(tl.trans(dscores), q_gated)
    at_k = (head * T + t[:, None]) * DK + c[None, :]
    in_k = (t[:, None] < T) & (c[None, :] < DK)
    if NEED_G:
        # Queries i >= t with keys j < t, in four parts: both beyond the chunk, the key before it, the query behind it,
        # and both in it, where the same rounded factors make the two sums cancel for what lies on one side of t.
        into = q_gated * (dq + dq_within) - k_gated * dk_within
        onwards = k_ending * dk
        dg = tl.cumsum(into, 0, reverse=True) + tl.cumsum(onwards, 0) - onwards
        dg += (tl.exp(tl.sum(g, 0)) * through)[None, :]
        tl.store(DG + at_k, dg, mask=in_k)
    tl.store(DQ + at_k, (dq + dq_within) * tl.exp(b) * scale, mask=in_k)
    tl.store(DKey + at_k, dk * to_end + dk_within * tl.exp(-b), mask=in_k)


def backward(saved, grad_out, needs=None):
    q, k, v, g, states = saved
    need_g = needs is None or needs[3]
    (B, H, T, DK), DV = q.shape, v.shape[3]
    scale = DK**-0.5
    do = grad_out.contiguous()
    dstates = _running_states(q, do, g, scale, from_end=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dg = torch.empty_like(g) if need_g else None
    CHUNK, BLOCK_K, BLOCK_V = _blocks(q, v)
    _gla_grads[(triton.cdiv(T, CHUNK), B * H)](
        q, k, v, g, do, states, dstates, dq, dk, dv, dg, T, DK, DV, scale, NEED_G=need_g,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=min(BLOCK_V, 32), num_warps=8 if BLOCK_K >= 64 else 4, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv, dg


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 75},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 8, "T": 2048, "K": 64, "V": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=r) for n in (K, K, V))
    g = torch.nn.functional.logsigmoid(torch.randn(B, H, T, K, generator=r)) / 16
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (q, k, v, g))


def reference(q, k, v, g):
    # Chunks of 64 tokens: dense within, states with a decay per channel between.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v, g))
    b = g.float().cumsum(3)
    q_gated, k_gated, k_ending = ((x * y.exp()).to(x.dtype) for x, y in ((q, b), (k, -b), (k, b[:, :, :, -1:] - b)))
    total = b[:, :, :, -1].cumsum(2)
    passed = (total - b[:, :, :, -1])[:, :, :, None] - total[:, :, None]
    chunk = torch.arange(total.shape[2], device=q.device)
    passed = passed.masked_fill((chunk[:, None] <= chunk)[..., None], float("-inf")).exp()
    states = torch.einsum("bhcdk,bhdkv->bhckv", passed, (k_ending.transpose(-1, -2) @ v).float())
    out = (q_gated @ k_gated.transpose(-1, -2)).tril() @ v + q_gated @ states.to(q.dtype)
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T]
