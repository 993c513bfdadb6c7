"""Gated delta rule by chunks: the scalar decay joins the WY form as one triangle of ratios, and leaves one sum as dg.

    S_t = a_t (S_(t - 1) - beta_t k_t k_t^T S_(t - 1)) + beta_t k_t v_t^T,    o_t = scale S_t^T q_t,    g = log a

With b the running sum of g in its chunk, R_ij = exp(b_i - b_j) for i >= j, M = (1 + strictly lower (beta K K^T R))^-1,
P = M diag(beta), and D = diag(exp(b)), D' = diag(exp(b_end - b)):

    W = P D K,  U = P V,  E = U - W S,  O = scale (D Q S + (Q K^T R) E),  S <- exp(b_end) S + (D' K)^T E

All exponents are of differences, never positive. Wherever exp(b_i - b_j) multiplies a term, the term's gradient goes
to b_i and from b_j: so q dq - k dk of the scores, the row less column sums of dA A through the inverse, and what state
and W ask make db, whose suffix sum inside the chunk is dg.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gated_delta_chunk",
    "family": "linear_attention",
    "op": "gated_delta_rule",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "closed-form", "recompute"),
    "saves": (
        "inverse: fp32 (B, H, chunks, C, C)", "w: fp32 (B, H, T, K)", "e: fp32 (B, H, T, V)",
        "states: fp32 (B, H, chunks, K, V)",
    ),
    "grads": ("q", "k", "v", "beta", "g"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _tokens(X, head, chunk, T, WIDTH, col, C: tl.constexpr, COLS: tl.constexpr):
    """Columns col.. of a chunk's rows of (heads, T, WIDTH), zeros past the end."""
    t = chunk * C + tl.arange(0, C)
    d = col + tl.arange(0, COLS)
    inside = (t[:, None] < T) & (d[None, :] < WIDTH)
    return tl.load(X + (head * T + t[:, None]) * WIDTH + d[None, :], mask=inside, other=0.0)


@triton.jit
def _put_tokens(X, tile, head, chunk, T, WIDTH, col, C: tl.constexpr, COLS: tl.constexpr):
    t = chunk * C + tl.arange(0, C)
    d = col + tl.arange(0, COLS)
    tl.store(X + (head * T + t[:, None]) * WIDTH + d[None, :], tile, mask=(t[:, None] < T) & (d[None, :] < WIDTH))


@triton.jit
def _per_token(X, head, chunk, T, C: tl.constexpr):
    t = chunk * C + tl.arange(0, C)
    return tl.load(X + head * T + t, mask=t < T, other=0.0).to(tl.float32)


@triton.jit
def _ratios(b, C: tl.constexpr):
    """exp(b_i - b_j) for i >= j, else 0."""
    i = tl.arange(0, C)
    return tl.exp(tl.where(i[:, None] >= i[None, :], b[:, None] - b[None, :], float("-inf")))


@triton.jit
def _state_tile(States, head, chunk, chunks, DK, DV, col, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_K)
    j = col + tl.arange(0, BLOCK_V)
    at = ((head * chunks + chunk) * DK + i[:, None]) * DV + j[None, :]
    return tl.load(States + at, mask=(i[:, None] < DK) & (j[None, :] < DV), other=0.0)


@triton.jit
def _put_state(States, state, head, chunk, chunks, DK, DV, col, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_K)
    j = col + tl.arange(0, BLOCK_V)
    at = ((head * chunks + chunk) * DK + i[:, None]) * DV + j[None, :]
    tl.store(States + at, state, mask=(i[:, None] < DK) & (j[None, :] < DV))


@triton.jit
def _chunk_system(
    K, V, Beta, G, Inverse, W, U, T, DK, DV, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    k = _tokens(K, head, chunk, T, DK, 0, C, BLOCK_K)
    beta = _per_token(Beta, head, chunk, T, C)
    b = tl.cumsum(_per_token(G, head, chunk, T, C), 0)
    system = tl.dot(k, tl.trans(k)) * _ratios(b, C) * beta[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    # Forward substitution: row r of the inverse is its unit row less the system's row times the rows above.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, C):
        row = tl.sum(tl.where(i[:, None] == r, system, 0.0), 0)
        inverse -= tl.where(i[:, None] == r, tl.sum(row[:, None] * inverse, 0)[None, :], 0.0)
    square = (head * tl.num_programs(0) + chunk) * C * C + i[:, None] * C + i[None, :]
    tl.store(Inverse + square, inverse)
    weights = inverse * beta[None, :]
    w = tl.dot((weights * tl.exp(b)[None, :]).to(k.dtype), k)
    _put_tokens(W, w, head, chunk, T, DK, 0, C, BLOCK_K)
    for col in range(0, DV, BLOCK_V):
        v = _tokens(V, head, chunk, T, DV, col, C, BLOCK_V)
        _put_tokens(U, tl.dot(weights.to(v.dtype), v), head, chunk, T, DV, col, C, BLOCK_V)


@triton.jit
def _states_forward(K, W, E, G, States, T, DK, DV, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    # E comes as U, and leaves as U - W S.
    col = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    chunks = tl.cdiv(T, C)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for chunk in range(chunks):
        _put_state(States, state, head, chunk, chunks, DK, DV, col, BLOCK_K, BLOCK_V)
        k = _tokens(K, head, chunk, T, DK, 0, C, BLOCK_K)
        w = _tokens(W, head, chunk, T, DK, 0, C, BLOCK_K).to(k.dtype)
        g = _per_token(G, head, chunk, T, C)
        b_end = tl.sum(g, 0)
        e = _tokens(E, head, chunk, T, DV, col, C, BLOCK_V) - tl.dot(w, state.to(k.dtype))
        _put_tokens(E, e, head, chunk, T, DV, col, C, BLOCK_V)
        k_ending = (k * tl.exp(b_end - tl.cumsum(g, 0))[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k_ending), e.to(k.dtype), state * tl.exp(b_end))


@triton.jit
def _chunk_outputs(
    Q, K, E, G, States, Out, T, DK, DV, scale, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    q = _tokens(Q, head, chunk, T, DK, 0, C, BLOCK_K)
    k = _tokens(K, head, chunk, T, DK, 0, C, BLOCK_K)
    b = tl.cumsum(_per_token(G, head, chunk, T, C), 0)
    scores = (tl.dot(q, tl.trans(k)) * _ratios(b, C)).to(q.dtype)
    q_begun = (q * tl.exp(b)[:, None]).to(q.dtype)
    for col in range(0, DV, BLOCK_V):
        state = _state_tile(States, head, chunk, tl.num_programs(0), DK, DV, col, BLOCK_K, BLOCK_V)
        e = _tokens(E, head, chunk, T, DV, col, C, BLOCK_V).to(q.dtype)
        out = tl.dot(scores, e, tl.dot(q_begun, state.to(q.dtype)))
        _put_tokens(Out, out * scale, head, chunk, T, DV, col, C, BLOCK_V)


def _tiles(q, v):
    """(chunk, widths): whole key channels; the serial passes want many programs, so narrow value tiles."""
    sizes = {"BLOCK_K": max(16, triton.next_power_of_2(q.shape[3])), "BLOCK_V": 16, "num_warps": 4}
    return sizes | {"C": 16 if q.shape[2] <= 128 else 32}


def forward(q, k, v, beta, g):
    q, k, v, beta, g = (x.contiguous() for x in (q, k, v, beta, g))
    (B, H, T, DK), DV = q.shape, v.shape[3]
    tiles = _tiles(q, v)
    chunks = triton.cdiv(T, tiles["C"])
    like = {"device": q.device, "dtype": torch.float32}
    inverse = torch.empty(B, H, chunks, tiles["C"], tiles["C"], **like)
    w, e = torch.empty(B, H, T, DK, **like), torch.empty(B, H, T, DV, **like)
    states = torch.empty(B, H, chunks, DK, DV, **like)
    out = torch.empty_like(v)
    _chunk_system[(chunks, B * H)](k, v, beta, g, inverse, w, e, T, DK, DV, **tiles)
    _states_forward[(triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](k, w, e, g, states, T, DK, DV, **tiles)
    _chunk_outputs[(chunks, B * H)](q, k, e, g, states, out, T, DK, DV, DK**-0.5, **tiles)
    return out, (q, k, v, beta, g, inverse, w, e, states)


# --- backward ---
@triton.jit
def _states_backward(
    Q, K, W, G, DO, DE, DStates, T, DK, DV, scale, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    # DStates[c] is the gradient of the state that leaves chunk c; with it dE of the chunk is known.
    col = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    chunks = tl.cdiv(T, C)
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        _put_state(DStates, dstate, head, chunk, chunks, DK, DV, col, BLOCK_K, BLOCK_V)
        q = _tokens(Q, head, chunk, T, DK, 0, C, BLOCK_K)
        k = _tokens(K, head, chunk, T, DK, 0, C, BLOCK_K)
        w = _tokens(W, head, chunk, T, DK, 0, C, BLOCK_K).to(k.dtype)
        do = _tokens(DO, head, chunk, T, DV, col, C, BLOCK_V)
        g = _per_token(G, head, chunk, T, C)
        b, b_end = tl.cumsum(g, 0), tl.sum(g, 0)
        scores = (tl.dot(q, tl.trans(k)) * _ratios(b, C) * scale).to(q.dtype)
        k_ending = (k * tl.exp(b_end - b)[:, None]).to(k.dtype)
        de = tl.dot(tl.trans(scores), do, tl.dot(k_ending, dstate.to(k.dtype)))
        _put_tokens(DE, de, head, chunk, T, DV, col, C, BLOCK_V)
        q_begun = (q * (tl.exp(b) * scale)[:, None]).to(q.dtype)
        dstate = tl.dot(tl.trans(q_begun), do, dstate * tl.exp(b_end)) - tl.dot(tl.trans(w), de.to(w.dtype))


@triton.jit
def _chunk_grads(
    Q, K, V, Beta, G, Inverse, E, States, DO, DE, DStates, DQ, DKey, DW, DVal, DP, DB, T, DK, DV, scale,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # All that does not pass through the inverse; dW and dP are left for the launch that does.
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    square = (head * chunks + chunk) * C * C + i[:, None] * C + i[None, :]
    beta = _per_token(Beta, head, chunk, T, C)
    weights = (tl.load(Inverse + square) * beta[None, :]).to(K.dtype.element_ty)
    dscores = tl.zeros((C, C), tl.float32)
    dp = tl.zeros((C, C), tl.float32)
    dq = tl.zeros((C, BLOCK_K), tl.float32)
    dk = tl.zeros((C, BLOCK_K), tl.float32)
    dw = tl.zeros((C, BLOCK_K), tl.float32)
    overlap = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for col in range(0, DV, BLOCK_V):
        state = _state_tile(States, head, chunk, chunks, DK, DV, col, BLOCK_K, BLOCK_V)
        dstate = _state_tile(DStates, head, chunk, chunks, DK, DV, col, BLOCK_K, BLOCK_V)
        overlap += state * dstate
        state = state.to(weights.dtype)
        do = _tokens(DO, head, chunk, T, DV, col, C, BLOCK_V)
        e = _tokens(E, head, chunk, T, DV, col, C, BLOCK_V).to(do.dtype)
        de = _tokens(DE, head, chunk, T, DV, col, C, BLOCK_V).to(do.dtype)
        v = _tokens(V, head, chunk, T, DV, col, C, BLOCK_V)
        dscores = tl.dot(do, tl.trans(e), dscores)
        dp = tl.dot(de, tl.trans(v), dp)
        dq = tl.dot(do, tl.trans(state), dq)
        dk = tl.dot(e, tl.trans(dstate.to(e.dtype)), dk)
        dw = tl.dot(de, tl.trans(state), dw)
        _put_tokens(DVal, tl.dot(tl.trans(weights), de), head, chunk, T, DV, col, C, BLOCK_V)
    q = _tokens(Q, head, chunk, T, DK, 0, C, BLOCK_K)
    k = _tokens(K, head, chunk, T, DK, 0, C, BLOCK_K)
    g = _per_token(G, head, chunk, T, C)
    b, b_end = tl.cumsum(g, 0), tl.sum(g, 0)
    dscores = (dscores * _ratios(b, C) * scale).to(q.dtype)
    dq = tl.dot(dscores, k, dq * (tl.exp(b) * scale)[:, None])
    _put_tokens(DQ, dq, head, chunk, T, DK, 0, C, BLOCK_K)
    # What the state asks of k rises with b_end, all that k gets here falls with its own b.
    dk *= tl.exp(b_end - b)[:, None]
    to_end = tl.sum(tl.sum(k * dk, 1), 0) + tl.exp(b_end) * tl.sum(tl.sum(overlap, 1), 0)
    dk = tl.dot(tl.trans(dscores), q, dk)
    _put_tokens(DKey, dk, head, chunk, T, DK, 0, C, BLOCK_K)
    # dW is minus what was summed; W = P D K, U = P V.
    k_begun = (k * tl.exp(b)[:, None]).to(k.dtype)
    tl.store(DP + square, dp - tl.dot(dw.to(k.dtype), tl.trans(k_begun)))
    _put_tokens(DW, -dw, head, chunk, T, DK, 0, C, BLOCK_K)
    t = chunk * C + i
    # The end of the last chunk may lie past T: gates there are 0, and b_end is the b of the last token.
    last = t == tl.minimum(T, (chunk + 1) * C) - 1
    db = tl.sum(q * dq - k * dk, 1) + tl.where(last, to_end, 0.0)
    tl.store(DB + head * T + t, db, mask=t < T)


@triton.jit
def _system_grads(
    K, Beta, G, Inverse, DP, DW, DKPart, DBPart, DKey, DBeta, DG, T, DK,
    C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    t = chunk * C + i
    square = (head * tl.num_programs(0) + chunk) * C * C + i[:, None] * C + i[None, :]
    k = _tokens(K, head, chunk, T, DK, 0, C, BLOCK_K)
    beta = _per_token(Beta, head, chunk, T, C)
    b = tl.cumsum(_per_token(G, head, chunk, T, C), 0)
    inverse = tl.load(Inverse + square)
    dp = tl.load(DP + square)
    # The adjoint of the inverse, in fp32 precision: it would amplify errors of rounded operands.
    da = tl.dot(tl.trans(inverse), dp * beta[None, :], input_precision="tf32x3")
    da = -tl.dot(da, tl.trans(inverse), input_precision="tf32x3")
    da = tl.where(i[:, None] > i[None, :], da, 0.0) * _ratios(b, C)
    through = da * tl.dot(k, tl.trans(k))
    tl.store(DBeta + head * T + t, tl.sum(dp * inverse, 0) + tl.sum(through, 1), mask=t < T)
    through *= beta[:, None]
    dgram = da * beta[:, None]
    dk_w = (
        tl.dot(
            tl.trans((inverse * beta[None, :]).to(k.dtype)), _tokens(DW, head, chunk, T, DK, 0, C, BLOCK_K).to(k.dtype)
        )
        * tl.exp(b)[:, None]
    )
    db = _per_token(DBPart, head, chunk, T, C) + tl.sum(k * dk_w, 1) + tl.sum(through, 1) - tl.sum(through, 0)
    tl.store(DG + head * T + t, tl.cumsum(db, 0, reverse=True), mask=t < T)
    dk = _tokens(DKPart, head, chunk, T, DK, 0, C, BLOCK_K) + dk_w
    dk = tl.dot((dgram + tl.trans(dgram)).to(k.dtype), k, dk)
    _put_tokens(DKey, dk, head, chunk, T, DK, 0, C, BLOCK_K)


def backward(saved, grad_out, needs=None):
    q, k, v, beta, g, inverse, w, e, states = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    tiles = _tiles(q, v)
    chunks, scale = states.shape[2], DK**-0.5
    # Read by the serial pass and again by the chunks, in tiles: one copy serves both.
    do = grad_out.contiguous()
    de, dstates, dw, dk_part, dp = (torch.empty_like(x) for x in (e, states, w, w, inverse))
    db = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    dq, dk, dv, dbeta, dg = (torch.empty_like(x) for x in (q, k, v, beta, g))
    _states_backward[(triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](q, k, w, g, do, de, dstates, T, DK, DV, scale, **tiles)
    # Five accumulators: twice the warps hold them.
    _chunk_grads[(chunks, B * H)](
        q, k, v, beta, g, inverse, e, states, do, de, dstates, dq, dk_part, dw, dv, dp, db, T, DK, DV, scale,
        **(tiles | {"num_warps": 8}),
    )  # fmt: skip
    del tiles["BLOCK_V"]
    _system_grads[(chunks, B * H)](k, beta, g, inverse, dp, dw, dk_part, db, dk, dbeta, dg, T, DK, **tiles)
    return dq, dk, dv, dbeta, dg


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 40},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=r) for n in (K, K, V))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.sigmoid(torch.randn(B, H, T, generator=r))
    g = torch.nn.functional.logsigmoid(torch.randn(B, H, T, generator=r) + 2.0)
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (q, k, v, beta, g))


def reference(q, k, v, beta, g):
    # One chunk as long as the sequence: (1 + strictly lower (beta k k^T R)) e = beta v.
    T = q.shape[2]
    b = g.float().cumsum(-1)
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    ratios = (b[..., :, None] - b[..., None, :]).masked_fill(later, float("-inf")).exp()
    system = (beta.float()[..., None] * (k @ k.transpose(-1, -2)).float() * ratios).tril(-1)
    errors = torch.linalg.solve_triangular(system, (beta[..., None] * v).float(), upper=False, unitriangular=True)
    scores = (q @ k.transpose(-1, -2)).float() * ratios
    return ((scores.to(v.dtype) @ errors.to(v.dtype)) * q.shape[-1] ** -0.5).to(v.dtype)
