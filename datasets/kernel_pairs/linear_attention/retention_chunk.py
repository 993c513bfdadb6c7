"""RetNet's retention, o_i = sum over j <= i of g^(i - j) (q_i . k_j) v_j with a fixed decay g per head, in chunks.

Three phases: outer products of each chunk in parallel, an elementwise pass that carries them over the chunks with
g^CHUNK, and the chunks' outputs in parallel. The backward runs the first two phases from the other end: the gradient
of the state collects g^(i + 1) q_i do_i^T where the state collects g^(CHUNK - 1 - j) k_j v_j^T. All powers have
exponents >= 0, so that nothing can overflow; the sums of a chunk are overwritten by the carried states in place.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "retention_chunk",
    "family": "linear_attention",
    "op": "retention",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "recompute", "in-place", "strided-cotangent"),
    "saves": ("states: fp32 (B, H, chunks, K, V)",),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _decayed_outer(
    A, B, Log2Decay, Sums, H, T, DK, DV, b_b, b_h, b_t, b_d, scale, TO_END: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # One chunk's sum of a_t b_t^T, each term decayed to the chunk's end or, for gradients, to the chunk's begin.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    log2_decay = tl.load(Log2Decay + head % H)
    i = tl.arange(0, CHUNK)
    t = chunk * CHUNK + i
    kd = tl.arange(0, BLOCK_K)
    vd = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    a = tl.load(A + (head * T + t[:, None]) * DK + kd[None, :], mask=(t[:, None] < T) & (kd[None, :] < DK), other=0.0)
    b_at = head // H * b_b + head % H * b_h + t[:, None].to(tl.int64) * b_t + vd[None, :] * b_d
    b = tl.load(B + b_at, mask=(t[:, None] < T) & (vd[None, :] < DV), other=0.0)
    if TO_END:
        steps = CHUNK - 1 - i
    else:
        steps = i + 1
    weight = tl.exp2(steps.to(tl.float32) * log2_decay) * scale
    total = tl.dot(tl.trans((a.to(tl.float32) * weight[:, None]).to(b.dtype)), b)
    at = ((head * tl.num_programs(0) + chunk) * DK + kd[:, None]) * DV + vd[None, :]
    tl.store(Sums + at, total, mask=(kd[:, None] < DK) & (vd[None, :] < DV))


@triton.jit
def _carry(Sums, Log2Decay, H, chunks, size, CHUNK: tl.constexpr, FROM_END: tl.constexpr, BLOCK: tl.constexpr):
    # In place: what a chunk adds is replaced by what reaches it from the chunks on its other side.
    head = tl.program_id(1).to(tl.int64)
    decay = tl.exp2(tl.load(Log2Decay + head % H) * CHUNK)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros((BLOCK,), tl.float32)
    for step in range(chunks):
        chunk = step
        if FROM_END:
            chunk = chunks - 1 - step
        here = Sums + (head * chunks + chunk) * size + at
        added = tl.load(here, mask=at < size, other=0.0)
        tl.store(here, state, mask=at < size)
        state = state * decay + added


@triton.jit
def _retention_out(
    Q, K, V, States, Log2Decay, Out, H, T, DK, DV, scale,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    log2_decay = tl.load(Log2Decay + head % H)
    i = tl.arange(0, CHUNK)
    t = chunk * CHUNK + i
    kd = tl.arange(0, BLOCK_K)
    vd = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = (t[:, None] < T) & (kd[None, :] < DK)
    in_v = (t[:, None] < T) & (vd[None, :] < DV)
    q = tl.load(Q + (head * T + t[:, None]) * DK + kd[None, :], mask=in_k, other=0.0)
    k = tl.load(K + (head * T + t[:, None]) * DK + kd[None, :], mask=in_k, other=0.0)
    v = tl.load(V + (head * T + t[:, None]) * DV + vd[None, :], mask=in_v, other=0.0)
    at = ((head * tl.num_programs(0) + chunk) * DK + kd[:, None]) * DV + vd[None, :]
    state = tl.load(States + at, mask=(kd[:, None] < DK) & (vd[None, :] < DV), other=0.0)
    ago = (i[:, None] - i[None, :]).to(tl.float32)
    decay = tl.where(ago >= 0, tl.exp2(tl.maximum(ago, 0.0) * log2_decay), 0.0)
    scores = tl.dot(q, tl.trans(k)) * decay * scale
    out = tl.dot(q, state.to(q.dtype)) * (tl.exp2((i + 1).to(tl.float32) * log2_decay) * scale)[:, None]
    out = tl.dot(scores.to(v.dtype), v, out)
    tl.store(Out + (head * T + t[:, None]) * DV + vd[None, :], out, mask=in_v)


def _blocks(q, v):
    """(CHUNK, BLOCK_K, BLOCK_V): key channels whole, value channels in tiles of at most 128."""
    chunk = 16 if q.shape[2] <= 256 else 128 // q.element_size()
    return chunk, max(16, triton.next_power_of_2(q.shape[3])), min(128, max(16, triton.next_power_of_2(v.shape[3])))


def _carried_states(a, b, log2_decay, scale, from_end):
    """(B, H, chunks, K, V) in fp32: what reaches each chunk from the chunks before it, or after it."""
    (B, H, T, DK), DV = a.shape, b.shape[3]
    CHUNK, BLOCK_K, BLOCK_V = _blocks(a, b)
    chunks = triton.cdiv(T, CHUNK)
    states = torch.empty(B, H, chunks, DK, DV, device=a.device, dtype=torch.float32)
    _decayed_outer[(chunks, B * H, triton.cdiv(DV, BLOCK_V))](
        a, b, log2_decay, states, H, T, DK, DV, *b.stride(), scale, TO_END=not from_end,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=8 if BLOCK_K * BLOCK_V > 8192 else 4,
    )  # fmt: skip
    _carry[(triton.cdiv(DK * DV, 512), B * H)](
        states, log2_decay, H, chunks, DK * DV, CHUNK=CHUNK, FROM_END=from_end, BLOCK=512, num_warps=4
    )
    return states


def forward(q, k, v, log2_decay):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    states = _carried_states(k, v, log2_decay, 1.0, from_end=False)
    out = torch.empty_like(v)
    CHUNK, BLOCK_K, BLOCK_V = _blocks(q, v)
    _retention_out[(triton.cdiv(T, CHUNK), B * H, triton.cdiv(DV, BLOCK_V))](
        q, k, v, states, log2_decay, out, H, T, DK, DV, DK**-0.5,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    return out, (q, k, v, log2_decay, states)


# --- backward ---
@triton.jit
def _retention_grads(
    Q, K, V, DO, States, DStates, Log2Decay, DQ, DKey, DVal, H, T, DK, DV, do_b, do_h, do_t, do_d, scale,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # All three gradients of one chunk; sums over value channels run in a loop, key channels are here as a whole.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    log2_decay = tl.load(Log2Decay + head % H)
    i = tl.arange(0, CHUNK)
    t = chunk * CHUNK + i
    kd = tl.arange(0, BLOCK_K)
    in_k = (t[:, None] < T) & (kd[None, :] < DK)
    at_k = (head * T + t[:, None]) * DK + kd[None, :]
    q = tl.load(Q + at_k, mask=in_k, other=0.0)
    k = tl.load(K + at_k, mask=in_k, other=0.0)
    DO += head // H * do_b + head % H * do_h
    ago = (i[:, None] - i[None, :]).to(tl.float32)
    decay = tl.where(ago >= 0, tl.exp2(tl.maximum(ago, 0.0) * log2_decay), 0.0) * scale
    from_begin = tl.exp2((i + 1).to(tl.float32) * log2_decay)
    to_end = tl.exp2((CHUNK - 1 - i).to(tl.float32) * log2_decay)
    scores = (tl.dot(q, tl.trans(k)) * decay).to(q.dtype)
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
    dq = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for first in range(0, DV, BLOCK_V):
        vd = first + tl.arange(0, BLOCK_V)
        in_v = (t[:, None] < T) & (vd[None, :] < DV)
        v = tl.load(V + (head * T + t[:, None]) * DV + vd[None, :], mask=in_v, other=0.0)
        do = tl.load(DO + t[:, None].to(tl.int64) * do_t + vd[None, :] * do_d, mask=in_v, other=0.0)
        at = ((head * tl.num_programs(0) + chunk) * DK + kd[:, None]) * DV + vd[None, :]
        in_s = (kd[:, None] < DK) & (vd[None, :] < DV)
        state = tl.load(States + at, mask=in_s, other=0.0).to(q.dtype)
        dstate = tl.load(DStates + at, mask=in_s, other=0.0).to(q.dtype)
        dscores = tl.dot(do, tl.trans(v), dscores)
        dq = tl.dot(do, tl.trans(state), dq)
        dk = tl.dot(v, tl.trans(dstate), dk)
        dv = tl.dot(k, dstate) * to_end[:, None]
        dv = tl.dot(tl.trans(scores), do, dv)
        tl.store(DVal + (head * T + t[:, None]) * DV + vd[None, :], dv, mask=in_v)
    dscores = (dscores * decay).to(q.dtype)
    dq = tl.dot(dscores, k, dq * (from_begin * scale)[:, None])
    dk = tl.dot(tl.trans(dscores), q, dk * to_end[:, None])
    tl.store(DQ + at_k, dq, mask=in_k)
    tl.store(DKey + at_k, dk, mask=in_k)


def backward(saved, grad_out, needs=None):
    q, k, v, log2_decay, states = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    scale = DK**-0.5
    dstates = _carried_states(q, grad_out, log2_decay, scale, from_end=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    CHUNK, BLOCK_K, BLOCK_V = _blocks(q, v)
    BLOCK_V = min(BLOCK_V, 64)
    _retention_grads[(triton.cdiv(T, CHUNK), B * H)](
        q, k, v, grad_out, states, dstates, log2_decay, dq, dk, dv, H, T, DK, DV, *grad_out.stride(), scale,
        CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=8 if BLOCK_K >= 64 else 4, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 3, "T": 43, "K": 12, "V": 75},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "K": 64, "V": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (K, K, V))
    # RetNet's decays 1 - 2^(-5 - h), as exact logarithms.
    log2_decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(H).double()))) / 0.6931471805599453
    return q, k, v, log2_decay.float().to(device)


def reference(q, k, v, log2_decay):
    # Chunks of 64 tokens: dense within, states with a fixed decay between.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    rate = 0.6931471805599453 * log2_decay.float()[:, None, None]
    token, chunk = (torch.arange(n, device=q.device) for n in (size, q.shape[2]))

    def decay(steps):
        return (rate * steps).masked_fill(steps < 0, float("-inf")).exp()

    within = ((q @ k.transpose(-1, -2)).float() * decay(token[:, None] - token)[:, None]).to(v.dtype) @ v
    added = (k * decay(size - 1 - token[:, None])[:, None]).to(k.dtype).transpose(-1, -2) @ v
    passed = decay(size * (chunk[:, None] - 1 - chunk))
    states = torch.einsum("hcd,bhdkv->bhckv", passed, added.float()).to(q.dtype)
    out = within + (q * decay(token[:, None] + 1)[:, None]).to(q.dtype) @ states
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T]
