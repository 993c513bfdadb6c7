"""Linear attention with one scalar gate per head and token: decay matrices are exact, gate gradients are row dots.

    o_t = scale q_t S_t,    S_t = exp(g_t) S_(t - 1) + k_t v_t^T

A scalar gate makes the decays of a chunk one (chunk, chunk) matrix exp(b_i - b_j), built from differences <= 0, so
that gates of any strength are safe. The score S_ij enters db_i with + and db_j with -: the row sum of S dS is o_i .
do_i, which needs no score at all, and the column sum is k_j . dk_j. dg is the sum of db over later tokens: within a
chunk in the kernel that has dk, over chunks by the totals of the later ones.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "simple_gla_chunk",
    "family": "linear_attention",
    "op": "simple_gated_linear_attention",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "saved-output", "recompute", "two-stage-partials"),
    "saves": ("out: fp32 or bf16 (B, T, H, V)", "states: fp32 (B, H, chunks, K, V)"),
    "grads": ("q", "k", "v", "g"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _head_tile(X, token, first, T, H, head, W, first_col, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    # Rows first to first + CHUNK of one head of a (B, T, H, W) tensor; `token` is where its sequence begins.
    t = first + tl.arange(0, CHUNK)
    c = first_col + tl.arange(0, BLOCK)
    at = ((token + t[:, None]) * H + head) * W + c[None, :]
    return tl.load(X + at, mask=(t[:, None] < T) & (c[None, :] < W), other=0.0)


@triton.jit
def _gates(G, token, first, T, H, head, CHUNK: tl.constexpr):
    # Log gates of a chunk; tokens past T get 0 and leave running sums as they are.
    t = first + tl.arange(0, CHUNK)
    return tl.load(G + (token + t) * H + head, mask=t < T, other=0.0).to(tl.float32)


@triton.jit
def _decays(b, CHUNK: tl.constexpr):
    i = tl.arange(0, CHUNK)
    return tl.exp(tl.where(i[:, None] >= i[None, :], b[:, None] - b[None, :], float("-inf")))


@triton.jit
def _scalar_states(
    A, B, G, States, T, H, DK, DV, scale, FROM_END: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(2).to(tl.int64)
    token, head = bh // H * T, bh % H
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
        tl.store(States + ((bh * chunks + chunk) * DK + i[:, None]) * DV + j[None, :], state, mask=in_state)
        a = _head_tile(A, token, chunk * CHUNK, T, H, head, DK, first_k, CHUNK, BLOCK_K)
        b = _head_tile(B, token, chunk * CHUNK, T, H, head, DV, first_v, CHUNK, BLOCK_V)
        g = _gates(G, token, chunk * CHUNK, T, H, head, CHUNK)
        total = tl.sum(g, 0)
        if FROM_END:
            weight = tl.exp(tl.cumsum(g, 0)) * scale
        else:
            weight = tl.exp(total - tl.cumsum(g, 0))
        state = tl.dot(tl.trans((a * weight[:, None]).to(b.dtype)), b, state * tl.exp(total))


@triton.jit
def _scalar_out(
    Q, K, V, G, States, Out, T, H, DK, DV, scale,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * CHUNK
    first_v = tl.program_id(1) * BLOCK_V
    bh = tl.program_id(2).to(tl.int64)
    token, head = bh // H * T, bh % H
    q = _head_tile(Q, token, first, T, H, head, DK, 0, CHUNK, BLOCK_K)
    k = _head_tile(K, token, first, T, H, head, DK, 0, CHUNK, BLOCK_K)
    v = _head_tile(V, token, first, T, H, head, DV, first_v, CHUNK, BLOCK_V)
    b = tl.cumsum(_gates(G, token, first, T, H, head, CHUNK), 0)
    c = tl.arange(0, BLOCK_K)
    e = first_v + tl.arange(0, BLOCK_V)
    at = ((bh * tl.num_programs(0) + tl.program_id(0)) * DK + c[:, None]) * DV + e[None, :]
    state = tl.load(States + at, mask=(c[:, None] < DK) & (e[None, :] < DV), other=0.0)
    scores = tl.dot(q, tl.trans(k)) * _decays(b, CHUNK) * scale
    out = tl.dot(scores.to(v.dtype), v, tl.dot(q, state.to(q.dtype)) * (tl.exp(b) * scale)[:, None])
    t = first + tl.arange(0, CHUNK)
    out_at = ((token + t[:, None]) * H + head) * DV + e[None, :]
    tl.store(Out + out_at, out, mask=(t[:, None] < T) & (e[None, :] < DV))


def _blocks(q, v):
    """(CHUNK, BLOCK_K, BLOCK_V): whole key channels, value channels in tiles of at most 64."""
    chunk = 16 if q.shape[1] <= 256 else 128 // q.element_size()
    return chunk, max(16, triton.next_power_of_2(q.shape[3])), min(64, max(16, triton.next_power_of_2(v.shape[3])))


def _chunk_states(a, b, g, scale, from_end):
    """(B, H, chunks, K, V) in fp32: what reaches each chunk from the chunks before it, or after it."""
    (B, T, H, DK), DV = a.shape, b.shape[3]
    CHUNK, BLOCK_K, BLOCK_V = _blocks(a, b)
    BLOCK_K = min(64, BLOCK_K)
    states = torch.empty(B, H, triton.cdiv(T, CHUNK), DK, DV, device=a.device, dtype=torch.float32)
    _scalar_states[(triton.cdiv(DK, BLOCK_K), triton.cdiv(DV, BLOCK_V), B * H)](
        a, b, g, states, T, H, DK, DV, scale, FROM_END=from_end,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4, num_stages=2,
    )  # fmt: skip
    return states


def forward(q, k, v, g):
    q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
    (B, T, H, DK), DV = q.shape, v.shape[3]
    states = _chunk_states(k, v, g, 1.0, from_end=False)
    out = torch.empty_like(v)
    CHUNK, BLOCK_K, BLOCK_V = _blocks(q, v)
    _scalar_out[(triton.cdiv(T, CHUNK), triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, g, states, out, T, H, DK, DV, DK**-0.5, CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4
    )
    return out, (q, k, v, g, out, states)


# --- backward ---
@triton.jit
def _scalar_grads(
    Q, K, V, G, Out, DO, States, DStates, DQ, DKey, DVal, DG, Totals, T, H, DK, DV, scale,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    first = chunk * CHUNK
    bh = tl.program_id(1).to(tl.int64)
    token, head = bh // H * T, bh % H
    q = _head_tile(Q, token, first, T, H, head, DK, 0, CHUNK, BLOCK_K)
    k = _head_tile(K, token, first, T, H, head, DK, 0, CHUNK, BLOCK_K)
    g = _gates(G, token, first, T, H, head, CHUNK)
    b = tl.cumsum(g, 0)
    decays = _decays(b, CHUNK) * scale
    from_begin = tl.exp(b) * scale
    to_end = tl.exp(tl.sum(g, 0) - b)
    scores = (tl.dot(q, tl.trans(k)) * decays).to(q.dtype)
    t = first + tl.arange(0, CHUNK)
    c = tl.arange(0, BLOCK_K)
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
    dq = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    db = tl.zeros((CHUNK,), tl.float32)
    for first_v in range(0, DV, BLOCK_V):
        v = _head_tile(V, token, first, T, H, head, DV, first_v, CHUNK, BLOCK_V)
        o = _head_tile(Out, token, first, T, H, head, DV, first_v, CHUNK, BLOCK_V)
        do = _head_tile(DO, token, first, T, H, head, DV, first_v, CHUNK, BLOCK_V)
        e = first_v + tl.arange(0, BLOCK_V)
        at = ((bh * chunks + chunk) * DK + c[:, None]) * DV + e[None, :]
        in_state = (c[:, None] < DK) & (e[None, :] < DV)
        state = tl.load(States + at, mask=in_state, other=0.0).to(q.dtype)
        dstate = tl.load(DStates + at, mask=in_state, other=0.0).to(q.dtype)
        db += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        dscores = tl.dot(do, tl.trans(v), dscores)
        dq = tl.dot(do, tl.trans(state), dq)
        dk = tl.dot(v, tl.trans(dstate), dk)
        dv = tl.dot(tl.trans(scores), do, tl.dot(k, dstate) * to_end[:, None])
        v_at = ((token + t[:, None]) * H + head) * DV + e[None, :]
        tl.store(DVal + v_at, dv, mask=(t[:, None] < T) & (e[None, :] < DV))
    dscores = (dscores * decays).to(q.dtype)
    dq = tl.dot(dscores, k, dq * from_begin[:, None])
    dk = tl.dot(tl.trans(dscores), q, dk * to_end[:, None])
    k_at = ((token + t[:, None]) * H + head) * DK + c[None, :]
    in_k = (t[:, None] < T) & (c[None, :] < DK)
    tl.store(DQ + k_at, dq, mask=in_k)
    tl.store(DKey + k_at, dk, mask=in_k)
    db -= tl.sum(k.to(tl.float32) * dk, 1)
    tl.store(DG + (token + t) * H + head, tl.cumsum(db, 0, reverse=True), mask=t < T)
    tl.store(Totals + bh * chunks + chunk, tl.sum(db, 0))


@triton.jit
def _add_later(Within, Totals, DG, T, H, chunks, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    # The suffix sum of a chunk lacks the totals of all later chunks.
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    later = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(chunk + 1, chunks, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        later += tl.load(Totals + bh * chunks + c, mask=c < chunks, other=0.0)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    at = (bh // H * T + t) * H + bh % H
    tl.store(DG + at, tl.load(Within + at, mask=t < T, other=0.0) + tl.sum(later, 0), mask=t < T)


def backward(saved, grad_out, needs=None):
    q, k, v, g, out, states = saved
    (B, T, H, DK), DV = q.shape, v.shape[3]
    do = grad_out.contiguous()
    dstates = _chunk_states(q, do, g, DK**-0.5, from_end=True)
    dq, dk, dv, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(g)
    CHUNK, BLOCK_K, BLOCK_V = _blocks(q, v)
    chunks = triton.cdiv(T, CHUNK)
    within = torch.empty(g.shape, device=g.device, dtype=torch.float32)
    totals = torch.empty(B, H, chunks, device=g.device, dtype=torch.float32)
    _scalar_grads[(chunks, B * H)](
        q, k, v, g, out, do, states, dstates, dq, dk, dv, within, totals, T, H, DK, DV, DK**-0.5,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=min(BLOCK_V, 32), num_warps=8 if BLOCK_K >= 64 else 4, num_stages=2,
    )  # fmt: skip
    _add_later[(chunks, B * H)](within, totals, dg, T, H, chunks, CHUNK=CHUNK, BLOCK_C=64, num_warps=1)
    return dq, dk, dv, dg


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 3, "T": 43, "K": 12, "V": 40},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 8, "T": 2048, "K": 128, "V": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, n, generator=r).to(device, getattr(torch, dtype)) for n in (K, K, V))
    # Gates stay in fp32, as their sums over a sequence do.
    return q, k, v, torch.nn.functional.logsigmoid(torch.randn(B, T, H, generator=r) + 2.0).to(device)


def reference(q, k, v, g):
    qf, kf, vf = (x.float().transpose(1, 2) for x in (q, k, v))
    b = g.float().cumsum(1).transpose(1, 2)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(later, float("-inf")).exp()
    return ((qf @ kf.transpose(-1, -2) * decay * q.shape[-1] ** -0.5) @ vf).transpose(1, 2).to(v.dtype)
