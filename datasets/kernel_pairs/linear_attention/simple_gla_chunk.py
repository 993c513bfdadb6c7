"""Linear attention with one scalar gate per head and token: decay matrices are exact, gate gradients are row dots.

    o_t = scale q_t S_t,    S_t = exp(g_t) S_(t - 1) + k_t v_t^T

A scalar gate makes the decays of a chunk one (chunk, chunk) matrix exp(b_i - b_j), built from differences <= 0, so
that gates of any strength are safe. dg_t sums S_ij dS_ij over all queries i >= t and keys j < t. Within a chunk these
are row and column sums of one tile; keys before the chunk come in by q . dq of the state's part, summed over i >= t;
queries behind it by k . dk of the state's part, summed over j < t; and what passes the whole chunk is the inner product
of the state and its gradient. So no sum runs over the sequence, and no rounding is carried along it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "simple_gla_chunk",
    "family": "linear_attention",
    "op": "simple_gated_linear_attention",
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
    return out, (q, k, v, g, states)


# --- backward ---
@triton.jit
def _scalar_grads(
    Q, K, V, G, DO, States, DStates, DQ, DKey, DVal, DG, T, H, DK, DV, scale,
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
    through = 0.0
    for first_v in range(0, DV, BLOCK_V):
        v = _head_tile(V, token, first, T, H, head, DV, first_v, CHUNK, BLOCK_V)
        do = _head_tile(DO, token, first, T, H, head, DV, first_v, CHUNK, BLOCK_V)
        e = first_v + tl.arange(0, BLOCK_V)
        at = ((bh * chunks + chunk) * DK + c[:, None]) * DV + e[None, :]
        in_state = (c[:, None] < DK) & (e[None, :] < DV)
        state = tl.load(States + at, mask=in_state, other=0.0)
        dstate = tl.load(DStates + at, mask=in_state, other=0.0)
        through += tl.sum(tl.sum(state * dstate, 1), 0)
        state = state.to(q.dtype)
        dstate = dstate.to(q.dtype)
        dscores = tl.dot(do, tl.trans(v), dscores)
        dq = tl.dot(do, tl.trans(state), dq)
        dk = tl.dot(v, tl.trans(dstate), dk)
        dv = tl.dot(tl.trans(scores), do, tl.dot(k, dstate) * to_end[:, None])
        v_at = ((token + t[:, None]) * H + head) * DV + e[None, :]
        tl.store(DVal + v_at, dv, mask=(t[:, None] < T) & (e[None, :] < DV))
    dq *= from_begin[:, None]
    dk *= to_end[:, None]
    # Both sums of one tile: what falls before t cancels exactly.
    within = scores.to(tl.float32) * dscores
    into = tl.sum(q.to(tl.float32) * dq, 1) + tl.sum(within, 1) - tl.sum(within, 0)
    onwards = tl.sum(k.to(tl.float32) * dk, 1)
    dg = tl.exp(tl.sum(g, 0)) * through + tl.cumsum(into, 0, reverse=True) + tl.cumsum(onwards, 0) - onwards
    tl.store(DG + (token + t) * H + head, dg, mask=t < T)
    dscores = (dscores * decays).to(q.dtype)
    dq = tl.dot(dscores, k, dq)
    dk = tl.dot(tl.trans(dscores), q, dk)
    k_at = ((token + t[:, None]) * H + head) * DK + c[None, :]
    in_k = (t[:, None] < T) & (c[None, :] < DK)
    tl.store(DQ + k_at, dq, mask=in_k)
    tl.store(DKey + k_at, dk, mask=in_k)


def backward(saved, grad_out, needs=None):
    q, k, v, g, states = saved
    (B, T, H, DK), DV = q.shape, v.shape[3]
    do = grad_out.contiguous()
    dstates = _chunk_states(q, do, g, DK**-0.5, from_end=True)
    dq, dk, dv, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(g)
    CHUNK, BLOCK_K, BLOCK_V = _blocks(q, v)
    chunks = triton.cdiv(T, CHUNK)
    _scalar_grads[(chunks, B * H)](
        q, k, v, g, do, states, dstates, dq, dk, dv, dg, T, H, DK, DV, DK**-0.5,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=min(BLOCK_V, 16), num_warps=8 if BLOCK_K >= 64 else 4, num_stages=2,
    )  # fmt: skip
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
    # Chunks of 64 tokens: dense within, states with one decay between.
    T = q.shape[1]
    size = 64 if T > 256 else 16
    q, k, v, g = (
        torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, -T % size)).unflatten(2, (-1, size))
        for x in (q, k, v, g[..., None])
    )
    b = g[..., 0].float().cumsum(3)
    token, chunk = (torch.arange(n, device=q.device) for n in (size, b.shape[2]))
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(token[:, None] < token, float("-inf")).exp()
    within = ((q @ k.transpose(-1, -2)).float() * decay).to(v.dtype) @ v
    added = (k * (b[..., -1:] - b).exp()[..., None]).to(k.dtype).transpose(-1, -2) @ v
    total = b[..., -1].cumsum(2)
    passed = (total - b[..., -1])[..., :, None] - total[..., None, :]
    passed = passed.masked_fill(chunk[:, None] <= chunk, float("-inf")).exp()
    states = torch.einsum("bhcd,bhdkv->bhckv", passed, added.float())
    out = within + (q * b.exp()[..., None]).to(q.dtype) @ states.to(q.dtype)
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T].transpose(1, 2)
