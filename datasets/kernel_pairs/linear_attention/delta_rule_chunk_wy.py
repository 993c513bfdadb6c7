"""Delta rule by chunks in WY form: the inverse of a unit triangle turns C rank-1 steps into products, backward as well.

Inside a chunk, with A = strictly lower (diag(beta) K K^T), M = (1 + A)^-1 and P = M diag(beta):

    W = P K,  U = P V,  E = U - W S,  O = scale (Q S + lower(Q K^T) E),  S <- S + K^T E

Only E and S depend on earlier chunks: one serial pass carries S forwards, another carries its gradient D backwards
and leaves dE = scale lower(Q K^T)^T dO + K D; all else is parallel over chunks. The adjoint of the inverse needs no
second solve: dA = -M^T dM M^T on the strict triangle, from the saved M.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "delta_rule_chunk_wy",
    "family": "linear_attention",
    "op": "delta_rule",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "closed-form", "recompute"),
    "saves": (
        "inverse: fp32 (B, H, chunks, C, C)", "w: fp32 (B, H, T, K)", "e: fp32 (B, H, T, V)",
        "states: fp32 (B, H, chunks, K, V)",
    ),
    "grads": ("q", "k", "v", "beta"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _chunk_rows(X, row, first, T, D, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = col + tl.arange(0, COLS)
    return tl.load(X + (row + t[:, None]) * D + d[None, :], mask=(t[:, None] < T) & (d[None, :] < D), other=0.0)


@triton.jit
def _put_rows(X, tile, row, first, T, D, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = col + tl.arange(0, COLS)
    tl.store(X + (row + t[:, None]) * D + d[None, :], tile, mask=(t[:, None] < T) & (d[None, :] < D))


@triton.jit
def _wy_prepare(
    K, V, Beta, Inverse, W, U, T, DK, DV, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    k = _chunk_rows(K, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    beta = tl.load(Beta + head * T + chunk * C + i, mask=chunk * C + i < T, other=0.0).to(tl.float32)
    a = tl.where(i[:, None] > i[None, :], tl.dot(k, tl.trans(k)) * beta[:, None], 0.0)
    # Forward substitution, one row a step: row r of the inverse is e_r - sum over j < r of a_rj row_j.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, C):
        here = i[:, None] == r
        factors = tl.sum(tl.where(here, a, 0.0), 0)
        inverse -= tl.where(here, tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    at = (head * tl.num_programs(0) + chunk) * C * C + i[:, None] * C + i[None, :]
    tl.store(Inverse + at, inverse)
    p = (inverse * beta[None, :]).to(k.dtype)
    _put_rows(W, tl.dot(p, k), head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    for first_v in range(0, DV, BLOCK_V):
        v = _chunk_rows(V, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
        _put_rows(U, tl.dot(p, v), head * T, chunk * C, T, DV, first_v, C, BLOCK_V)


@triton.jit
def _wy_states(
    K, W, E, States, T, DK, DV, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    # E holds U, and is overwritten by U - W S.
    head = tl.program_id(1).to(tl.int64)
    first_v = tl.program_id(0) * BLOCK_V
    i = tl.arange(0, BLOCK_K)
    j = first_v + tl.arange(0, BLOCK_V)
    in_state = (i[:, None] < DK) & (j[None, :] < DV)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    chunks = tl.cdiv(T, C)
    for chunk in range(chunks):
        tl.store(States + ((head * chunks + chunk) * DK + i[:, None]) * DV + j[None, :], state, mask=in_state)
        k = _chunk_rows(K, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
        w = _chunk_rows(W, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
        e = _chunk_rows(E, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
        e -= tl.dot(w.to(k.dtype), state.to(k.dtype))
        _put_rows(E, e, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
        state = tl.dot(tl.trans(k), e.to(k.dtype), state)


@triton.jit
def _wy_out(
    Q, K, E, States, Out, T, DK, DV, scale, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    chunk = tl.program_id(0)
    first_v = tl.program_id(1) * BLOCK_V
    head = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, C)
    q = _chunk_rows(Q, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    k = _chunk_rows(K, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    e = _chunk_rows(E, head * T, chunk * C, T, DV, first_v, C, BLOCK_V).to(q.dtype)
    state = _chunk_rows(States, (head * tl.num_programs(0) + chunk) * DK, 0, DK, DV, first_v, BLOCK_K, BLOCK_V)
    scores = tl.where(i[:, None] >= i[None, :], tl.dot(q, tl.trans(k)), 0.0)
    out = tl.dot(scores.to(q.dtype), e, tl.dot(q, state.to(q.dtype))) * scale
    _put_rows(Out, out, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)


def _blocks(q, v):
    """(C, BLOCK_K, BLOCK_V): the substitution takes C steps, so chunks stay short."""
    block_k, block_v = (max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))
    return 16 if q.shape[2] <= 256 else 32, block_k, min(32, block_v)


def forward(q, k, v, beta):
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    C, BLOCK_K, BLOCK_V = _blocks(q, v)
    chunks, slabs = triton.cdiv(T, C), triton.cdiv(DV, BLOCK_V)
    inverse, w, e, states = (
        torch.empty(B, H, *shape, device=q.device, dtype=torch.float32)
        for shape in ((chunks, C, C), (T, DK), (T, DV), (chunks, DK, DV))
    )
    tiles = {"C": C, "BLOCK_K": BLOCK_K, "BLOCK_V": BLOCK_V, "num_warps": 4}
    _wy_prepare[(chunks, B * H)](k, v, beta, inverse, w, e, T, DK, DV, **tiles)
    _wy_states[(slabs, B * H)](k, w, e, states, T, DK, DV, **tiles)
    out = torch.empty_like(v)
    _wy_out[(chunks, slabs, B * H)](q, k, e, states, out, T, DK, DV, DK**-0.5, **tiles)
    return out, (q, k, v, beta, inverse, w, e, states)


# --- backward ---
@triton.jit
def _wy_dstates(
    Q, K, W, DO, DE, DStates, T, DK, DV, scale, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    # Value channels never mix: this slab of D walks from the last chunk to the first.
    head = tl.program_id(1).to(tl.int64)
    first_v = tl.program_id(0) * BLOCK_V
    i = tl.arange(0, C)
    chunks = tl.cdiv(T, C)
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        _put_rows(DStates, dstate, (head * chunks + chunk) * DK, 0, DK, DV, first_v, BLOCK_K, BLOCK_V)
        q = _chunk_rows(Q, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
        k = _chunk_rows(K, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
        w = _chunk_rows(W, head * T, chunk * C, T, DK, 0, C, BLOCK_K).to(k.dtype)
        do = _chunk_rows(DO, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
        scores_t = tl.where(i[:, None] <= i[None, :], tl.dot(k, tl.trans(q)), 0.0) * scale
        de = tl.dot(scores_t.to(do.dtype), do, tl.dot(k, dstate.to(k.dtype)))
        _put_rows(DE, de, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
        dstate += tl.dot(tl.trans(q), do) * scale - tl.dot(tl.trans(w), de.to(w.dtype))


@triton.jit
def _wy_grads(
    Q, K, V, Beta, Inverse, E, States, DO, DE, DStates, DQ, DKPart, DW, DP, DVal, T, DK, DV, scale,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # What does not pass through the inverse, and the cotangents of W and P, which do.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    state_row = (head * tl.num_programs(0) + chunk) * DK
    i = tl.arange(0, C)
    q = _chunk_rows(Q, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    k = _chunk_rows(K, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    beta = tl.load(Beta + head * T + chunk * C + i, mask=chunk * C + i < T, other=0.0).to(tl.float32)
    square = (head * tl.num_programs(0) + chunk) * C * C + i[:, None] * C + i[None, :]
    p = (tl.load(Inverse + square) * beta[None, :]).to(k.dtype)
    dq = tl.zeros((C, BLOCK_K), tl.float32)
    dk = tl.zeros((C, BLOCK_K), tl.float32)
    dw = tl.zeros((C, BLOCK_K), tl.float32)
    dscores = tl.zeros((C, C), tl.float32)
    dp = tl.zeros((C, C), tl.float32)
    for first_v in range(0, DV, BLOCK_V):
        v = _chunk_rows(V, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
        e = _chunk_rows(E, head * T, chunk * C, T, DV, first_v, C, BLOCK_V).to(v.dtype)
        do = _chunk_rows(DO, head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
        de = _chunk_rows(DE, head * T, chunk * C, T, DV, first_v, C, BLOCK_V).to(v.dtype)
        state = _chunk_rows(States, state_row, 0, DK, DV, first_v, BLOCK_K, BLOCK_V).to(v.dtype)
        dstate = _chunk_rows(DStates, state_row, 0, DK, DV, first_v, BLOCK_K, BLOCK_V).to(v.dtype)
        dscores = tl.dot(do, tl.trans(e), dscores)
        dq = tl.dot(do, tl.trans(state), dq)
        dk = tl.dot(e, tl.trans(dstate), dk)
        dw -= tl.dot(de, tl.trans(state))
        dp = tl.dot(de, tl.trans(v), dp)
        _put_rows(DVal, tl.dot(tl.trans(p), de), head * T, chunk * C, T, DV, first_v, C, BLOCK_V)
    dscores = (tl.where(i[:, None] >= i[None, :], dscores, 0.0) * scale).to(q.dtype)
    _put_rows(DQ, tl.dot(dscores, k, dq * scale), head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    _put_rows(DKPart, tl.dot(tl.trans(dscores), q, dk), head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    _put_rows(DW, dw, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    # W and U share P: dP = dW K^T + dE V^T.
    tl.store(DP + square, tl.dot(dw.to(k.dtype), tl.trans(k), dp))


@triton.jit
def _wy_inverse_grads(
    K, Beta, Inverse, DKPart, DW, DP, DKey, DBeta, T, DK, C: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    # Through P = M diag(beta), the inverse, and beta K K^T. In the launch above its products would spill.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    k = _chunk_rows(K, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    in_t = chunk * C + i < T
    beta = tl.load(Beta + head * T + chunk * C + i, mask=in_t, other=0.0).to(tl.float32)
    square = (head * tl.num_programs(0) + chunk) * C * C + i[:, None] * C + i[None, :]
    inverse = tl.load(Inverse + square)
    dp = tl.load(DP + square)
    dbeta = tl.sum(dp * inverse, 0)
    # Products of the inverse keep fp32 precision: it would amplify errors of rounded operands.
    da = tl.dot(tl.trans(inverse), dp * beta[None, :], input_precision="tf32x3")
    da = -tl.dot(da, tl.trans(inverse), input_precision="tf32x3")
    da = tl.where(i[:, None] > i[None, :], da, 0.0)
    dbeta += tl.sum(da * tl.dot(k, tl.trans(k)), 1)
    tl.store(DBeta + head * T + chunk * C + i, dbeta, mask=in_t)
    dgram = da * beta[:, None]
    dw = _chunk_rows(DW, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    dk = _chunk_rows(DKPart, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    p = (inverse * beta[None, :]).to(k.dtype)
    dk = tl.dot(tl.trans(p), dw.to(k.dtype), dk)
    # k_i . k_j is symmetric in what it asks of k.
    dk = tl.dot((dgram + tl.trans(dgram)).to(k.dtype), k, dk)
    _put_rows(DKey, dk, head * T, chunk * C, T, DK, 0, C, BLOCK_K)


def backward(saved, grad_out, needs=None):
    q, k, v, beta, inverse, w, e, states = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    C, BLOCK_K, BLOCK_V = _blocks(q, v)
    do = grad_out.contiguous()
    de, dstates, dw, dk_part = (torch.empty_like(x) for x in (e, states, w, w))
    dp = torch.empty_like(inverse)
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    tiles = {"C": C, "BLOCK_K": BLOCK_K, "num_warps": 4}
    _wy_dstates[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, w, do, de, dstates, T, DK, DV, DK**-0.5, BLOCK_V=BLOCK_V, **tiles
    )
    grid = (triton.cdiv(T, C), B * H)
    # Six tiles a step and five accumulators: more than 16 value channels at a time would spill.
    _wy_grads[grid](
        q, k, v, beta, inverse, e, states, do, de, dstates, dq, dk_part, dw, dp, dv, T, DK, DV, DK**-0.5,
        C=C, BLOCK_K=BLOCK_K, BLOCK_V=16, num_warps=8 if BLOCK_K >= 64 else 4,
    )  # fmt: skip
    _wy_inverse_grads[grid](k, beta, inverse, dk_part, dw, dp, dk, dbeta, T, DK, **tiles)
    return dq, dk, dv, dbeta


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 40},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g) for n in (K, K, V))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.sigmoid(torch.randn(B, H, T, generator=g))
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (q, k, v, beta))


def reference(q, k, v, beta):
    # Chunks of 128 tokens: a triangular system within, and a state that each chunk corrects.
    T = q.shape[2]
    size = 128 if T > 256 else 16
    q, k, v, beta = (
        torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v, beta[..., None])
    )
    system = (beta * (k @ k.transpose(-1, -2))).float().tril(-1)
    right = (beta * torch.cat((k, v), -1)).float()
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).to(v.dtype)
    w, u = solved.split((k.shape[-1], v.shape[-1]), -1)
    state = torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1], device=q.device)
    states, errors = [], []
    for chunk in range(q.shape[2]):
        states.append(state.to(v.dtype))
        errors.append(u[:, :, chunk] - w[:, :, chunk] @ states[-1])
        state = state + k[:, :, chunk].transpose(-1, -2) @ errors[-1]
    out = q @ torch.stack(states, 2) + (q @ k.transpose(-1, -2)).tril() @ torch.stack(errors, 2)
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T]
