"""Gated linear attention with strong gates: chunks of 64, sub-blocks of 16 inside, and no exponential ever grows.

    o_t = scale q_t S_t,    S_t = diag(exp(g_t)) S_(t - 1) + k_t v_t^T,    scores_ij = scale q_i exp(b_i - b_j) k_j

b is the running sum of g in a chunk. Split as (q exp(b_i)) (k exp(-b_j)) the scores overflow when a chunk forgets much.
Between two sub-blocks the split is made at a border between them, so that both exponents are negative: the begin of
the queries' sub-block for scores and dq, the end of the keys' for dk, each one reference for a whole row or column of
sub-blocks. The diagonal sub-blocks take the differences themselves, one key (or query) at a time. As only differences
enter, db = q dq - k dk, and dg is its sum over all later tokens. Over whole chunks these terms cancel but for rounding:
the sum ends with its chunk, and what is behind it is the sum over v of S dS at the chunk's end.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gla_secondary_chunk",
    "family": "linear_attention",
    "op": "gated_linear_attention",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "owner-grid", "recompute"),
    "saves": (
        "b: fp32 (B, H, T, K)", "scores: fp32 or bf16 (B, H, T, C)", "states: fp32 (B * H, chunks, K, V)",
    ),
    "grads": ("q", "k", "v", "g"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _rows(X, row, first, T, WIDTH, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows first.. of one head, whose first row is `row`; zeros past T."""
    t = first + tl.arange(0, ROWS)
    d = col + tl.arange(0, COLS)
    inside = (t[:, None] < T) & (d[None, :] < WIDTH)
    return tl.load(X + (row + t[:, None]) * WIDTH + d[None, :], mask=inside, other=0.0)


@triton.jit
def _put_rows(X, tile, row, first, T, WIDTH, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = col + tl.arange(0, COLS)
    tl.store(X + (row + t[:, None]) * WIDTH + d[None, :], tile, mask=(t[:, None] < T) & (d[None, :] < WIDTH))


@triton.jit
def _row(X, row, t, T, WIDTH, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    return tl.load(X + (row + t) * WIDTH + c, mask=(c < WIDTH) & (t < T), other=0.0).to(tl.float32)[None, :]


@triton.jit
def _chunk_cumsum(G, Bsum, T, DK, C: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * T
    first = tl.program_id(0) * C
    g = _rows(G, row, first, T, DK, 0, C, BLOCK_K).to(tl.float32)
    _put_rows(Bsum, tl.cumsum(g, 0), row, first, T, DK, 0, C, BLOCK_K)


@triton.jit
def _block_scores(Q, K, Bsum, Scores, T, DK, scale, C: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr):
    # One sub-block of queries: a row of sub-blocks of scores, (SUB, C), zeros behind the diagonal.
    first = tl.program_id(0) * SUB
    row = tl.program_id(1).to(tl.int64) * T
    chunk_begin = first // C * C
    i = tl.arange(0, SUB)
    q = _rows(Q, row, first, T, DK, 0, SUB, BLOCK_K)
    b = _rows(Bsum, row, first, T, DK, 0, SUB, BLOCK_K)
    out = Scores + (row + first + i[:, None]) * C
    in_t = first + i[:, None] < T
    # The running sum before the sub-block: of its chunk's begin it is zero.
    border = tl.zeros((1, BLOCK_K), tl.float32)
    if first > chunk_begin:
        border = _row(Bsum, row, first - 1, T, DK, BLOCK_K)
    q_after = (q * tl.exp(b - border) * scale).to(q.dtype)
    for start in range(chunk_begin, first, SUB):
        k = _rows(K, row, start, T, DK, 0, SUB, BLOCK_K)
        k_before = (k * tl.exp(border - _rows(Bsum, row, start, T, DK, 0, SUB, BLOCK_K))).to(k.dtype)
        tl.store(out + (start - chunk_begin + i)[None, :], tl.dot(q_after, tl.trans(k_before)), mask=in_t)
    for start in range(first + SUB, chunk_begin + C, SUB):
        tl.store(out + (start - chunk_begin + i)[None, :], tl.zeros((SUB, SUB), Scores.dtype.element_ty), mask=in_t)
    for j in range(SUB):
        decay = tl.exp(tl.minimum(b - _row(Bsum, row, first + j, T, DK, BLOCK_K), 0.0))
        column = tl.sum(q * _row(K, row, first + j, T, DK, BLOCK_K) * decay, 1) * scale
        at = Scores + (row + first + i) * C + (first - chunk_begin + j)
        tl.store(at, tl.where(i >= j, column, 0.0), mask=first + i < T)


@triton.jit
def _gated_states(
    A, X, Bsum, States, T, DK, DV, scale, FROM_END: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Sums of k exp(b_end - b) v^T before each chunk; FROM_END of scale q exp(b) do^T behind it.
    head = tl.program_id(2).to(tl.int64)
    k_col, v_col = tl.program_id(0) * BLOCK_K, tl.program_id(1) * BLOCK_V
    i = k_col + tl.arange(0, BLOCK_K)
    j = v_col + tl.arange(0, BLOCK_V)
    in_state = (i[:, None] < DK) & (j[None, :] < DV)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    chunks = tl.cdiv(T, C)
    for step in range(chunks):
        chunk = step
        if FROM_END:
            chunk = chunks - 1 - step
        tl.store(States + ((head * chunks + chunk) * DK + i[:, None]) * DV + j[None, :], state, mask=in_state)
        a = _rows(A, head * T, chunk * C, T, DK, k_col, C, BLOCK_K)
        x = _rows(X, head * T, chunk * C, T, DV, v_col, C, BLOCK_V)
        b = _rows(Bsum, head * T, chunk * C, T, DK, k_col, C, BLOCK_K)
        last = tl.minimum((chunk + 1) * C, T) - 1
        b_end = tl.load(Bsum + (head * T + last) * DK + i, mask=i < DK, other=0.0)
        if FROM_END:
            a = (a * tl.exp(b) * scale).to(x.dtype)
        else:
            a = (a * tl.exp(tl.minimum(b_end[None, :] - b, 0.0))).to(x.dtype)
        state = tl.dot(tl.trans(a), x, state * tl.exp(b_end)[:, None])


@triton.jit
def _chunk_out(
    Q, V, Bsum, Scores, States, Out, T, DK, DV, scale, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    chunk = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_V
    head = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, C)
    q = _rows(Q, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    q_begun = (q * tl.exp(_rows(Bsum, head * T, chunk * C, T, DK, 0, C, BLOCK_K)) * scale).to(q.dtype)
    state = _rows(States, (head * tl.num_programs(0) + chunk) * DK, 0, DK, DV, col, BLOCK_K, BLOCK_V)
    square = (head * T + chunk * C + i[:, None]) * C + i[None, :]
    scores = tl.load(Scores + square, mask=chunk * C + i[:, None] < T, other=0.0)
    v = _rows(V, head * T, chunk * C, T, DV, col, C, BLOCK_V)
    out = tl.dot(scores.to(v.dtype), v, tl.dot(q_begun, state.to(q.dtype)))
    _put_rows(Out, out, head * T, chunk * C, T, DV, col, C, BLOCK_V)


def _tiles(q, v):
    """Chunk and the widths: whole key channels, value channels in tiles."""
    return {
        "C": 32 if q.shape[2] <= 256 else 64, "BLOCK_K": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_V": min(32, max(16, triton.next_power_of_2(v.shape[3]))), "num_warps": 4,
    }  # fmt: skip


def _running_states(a, x, b, scale, from_end):
    (B, H, T, DK), DV = a.shape, x.shape[3]
    tiles = _tiles(a, x)
    tiles["BLOCK_K"] = min(32, tiles["BLOCK_K"])
    states = torch.empty(B * H, triton.cdiv(T, tiles["C"]), DK, DV, device=a.device, dtype=torch.float32)
    _gated_states[(triton.cdiv(DK, tiles["BLOCK_K"]), triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](
        a, x, b, states, T, DK, DV, scale, FROM_END=from_end, **tiles
    )
    return states


def forward(q, k, v, g):
    q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    tiles = _tiles(q, v)
    C, BLOCK_K = tiles["C"], tiles["BLOCK_K"]
    chunks = triton.cdiv(T, C)
    b = torch.empty(q.shape, device=q.device, dtype=torch.float32)
    scores = torch.empty(B, H, T, C, device=q.device, dtype=q.dtype)
    out = torch.empty_like(v)
    _chunk_cumsum[(chunks, B * H)](g, b, T, DK, C=C, BLOCK_K=BLOCK_K, num_warps=4)
    _block_scores[(triton.cdiv(T, 16), B * H)](
        q, k, b, scores, T, DK, DK**-0.5, C=C, SUB=16, BLOCK_K=BLOCK_K, num_warps=2
    )
    states = _running_states(k, v, b, 1.0, from_end=False)
    _chunk_out[(chunks, triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](
        q, v, b, scores, states, out, T, DK, DV, DK**-0.5, **tiles
    )
    return out, (q, k, v, b, scores, states, g.dtype)


# --- backward ---
@triton.jit
def _chunk_grads(
    K, V, Bsum, Scores, States, DStates, DO, DScores, DQ, DKey, DVal, DEnd, T, DK, DV, scale,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # dv whole; of dq and dk what passes through the states; S dS of the chunk's end; and dscores for the sub-blocks.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row, first = head * T, chunk * C
    state_row = (head * tl.num_programs(0) + chunk) * DK
    i = tl.arange(0, C)
    c = tl.arange(0, BLOCK_K)
    b = _rows(Bsum, row, first, T, DK, 0, C, BLOCK_K)
    last = tl.minimum(first + C, T) - 1
    b_end = tl.load(Bsum + (row + last) * DK + c, mask=c < DK, other=0.0)
    to_end = tl.exp(tl.minimum(b_end[None, :] - b, 0.0))
    k = _rows(K, row, first, T, DK, 0, C, BLOCK_K)
    k_ending = (k * to_end).to(k.dtype)
    square = (row + first + i[:, None]) * C + i[None, :]
    in_t = first + i[:, None] < T
    scores = tl.load(Scores + square, mask=in_t, other=0.0)
    dscores = tl.zeros((C, C), tl.float32)
    dq = tl.zeros((C, BLOCK_K), tl.float32)
    dk = tl.zeros((C, BLOCK_K), tl.float32)
    passed = tl.zeros((BLOCK_K,), tl.float32)
    for col in range(0, DV, BLOCK_V):
        v = _rows(V, row, first, T, DV, col, C, BLOCK_V)
        do = _rows(DO, row, first, T, DV, col, C, BLOCK_V)
        state = _rows(States, state_row, 0, DK, DV, col, BLOCK_K, BLOCK_V)
        dstate = _rows(DStates, state_row, 0, DK, DV, col, BLOCK_K, BLOCK_V)
        passed += tl.sum(state * dstate, 1)
        state, dstate = state.to(v.dtype), dstate.to(v.dtype)
        dscores = tl.dot(do, tl.trans(v), dscores)
        dq = tl.dot(do, tl.trans(state), dq)
        dk = tl.dot(v, tl.trans(dstate), dk)
        dv = tl.dot(tl.trans(scores), do, tl.dot(k_ending, dstate))
        _put_rows(DVal, dv, row, first, T, DV, col, C, BLOCK_V)
    tl.store(DScores + square, tl.where(i[:, None] >= i[None, :], dscores * scale, 0.0), mask=in_t)
    _put_rows(DQ, dq * tl.exp(b) * scale, row, first, T, DK, 0, C, BLOCK_K)
    dk *= to_end
    _put_rows(DKey, dk, row, first, T, DK, 0, C, BLOCK_K)
    # The state at the chunk's end: what it began with, and this chunk's keys.
    at_end = DEnd + (head * tl.num_programs(0) + chunk) * DK + c
    tl.store(at_end, passed * tl.exp(b_end) + tl.sum(k * dk, 0), mask=c < DK)


@triton.jit
def _dscores_tile(DScores, row, first, col, T, C: tl.constexpr, SUB: tl.constexpr):
    i = tl.arange(0, SUB)
    at = DScores + (row + first + i[:, None]) * C + (col + i)[None, :]
    return tl.load(at, mask=first + i[:, None] < T, other=0.0)


@triton.jit
def _block_grads(
    Q, K, Bsum, DScores, DQPart, DKPart, DQ, DKey, DB, T, DK, C: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr
):
    # A sub-block as queries, against those before it, and as keys, against those behind it in the chunk.
    first = tl.program_id(0) * SUB
    row = tl.program_id(1).to(tl.int64) * T
    chunk_begin = first // C * C
    here = first - chunk_begin
    i = tl.arange(0, SUB)
    q = _rows(Q, row, first, T, DK, 0, SUB, BLOCK_K)
    k = _rows(K, row, first, T, DK, 0, SUB, BLOCK_K)
    b = _rows(Bsum, row, first, T, DK, 0, SUB, BLOCK_K)
    border = tl.zeros((1, BLOCK_K), tl.float32)
    if first > chunk_begin:
        border = _row(Bsum, row, first - 1, T, DK, BLOCK_K)
    dq = tl.zeros((SUB, BLOCK_K), tl.float32)
    for start in range(chunk_begin, first, SUB):
        before = _rows(K, row, start, T, DK, 0, SUB, BLOCK_K)
        before = before * tl.exp(border - _rows(Bsum, row, start, T, DK, 0, SUB, BLOCK_K))
        ds = _dscores_tile(DScores, row, first, start - chunk_begin, T, C, SUB)
        dq = tl.dot(ds.to(q.dtype), before.to(q.dtype), dq)
    # Rows past T have b = 0 and zero gradients: their factors are cut at 1.
    dq = dq * tl.exp(tl.minimum(b - border, 0.0)) + _rows(DQPart, row, first, T, DK, 0, SUB, BLOCK_K)

    end = tl.minimum(first + SUB, T) - 1
    border = _row(Bsum, row, end, T, DK, BLOCK_K)
    dk = tl.zeros((SUB, BLOCK_K), tl.float32)
    for start in range(first + SUB, tl.minimum(chunk_begin + C, T), SUB):
        behind = _rows(Q, row, start, T, DK, 0, SUB, BLOCK_K)
        behind = behind * tl.exp(tl.minimum(_rows(Bsum, row, start, T, DK, 0, SUB, BLOCK_K) - border, 0.0))
        ds = _dscores_tile(DScores, row, start, here, T, C, SUB)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), behind.to(q.dtype), dk)
    dk = dk * tl.exp(tl.minimum(border - b, 0.0)) + _rows(DKPart, row, first, T, DK, 0, SUB, BLOCK_K)

    for j in range(SUB):
        b_j = _row(Bsum, row, first + j, T, DK, BLOCK_K)
        # Column j of the diagonal for dq, row j for dk.
        ds_column = tl.load(DScores + (row + first + i) * C + here + j, mask=first + i < T, other=0.0)
        dq += ds_column[:, None] * _row(K, row, first + j, T, DK, BLOCK_K) * tl.exp(tl.minimum(b - b_j, 0.0))
        ds_row = tl.load(DScores + (row + first + j) * C + here + i, mask=first + j < T, other=0.0)
        dk += ds_row[:, None] * _row(Q, row, first + j, T, DK, BLOCK_K) * tl.exp(tl.minimum(b_j - b, 0.0))
    _put_rows(DQ, dq, row, first, T, DK, 0, SUB, BLOCK_K)
    _put_rows(DKey, dk, row, first, T, DK, 0, SUB, BLOCK_K)
    _put_rows(DB, q * dq - k * dk, row, first, T, DK, 0, SUB, BLOCK_K)


@triton.jit
def _later_sums(DB, DEnd, DG, T, DK, C: tl.constexpr, BLOCK_K: tl.constexpr):
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_K)
    db = _rows(DB, head * T, chunk * C, T, DK, 0, C, BLOCK_K)
    behind = tl.load(DEnd + (head * tl.num_programs(0) + chunk) * DK + c, mask=c < DK, other=0.0)
    dg = tl.cumsum(db, 0, reverse=True) + behind[None, :]
    _put_rows(DG, dg, head * T, chunk * C, T, DK, 0, C, BLOCK_K)


def backward(saved, grad_out, needs=None):
    q, k, v, b, scores, states, gate_dtype = saved
    need_g = needs is None or needs[3]
    (B, H, T, DK), DV = q.shape, v.shape[3]
    tiles = _tiles(q, v)
    # Read by the states' pass and by the chunks, in tiles: one copy serves both.
    do = grad_out.contiguous()
    dstates = _running_states(q, do, b, DK**-0.5, from_end=True)
    dscores = torch.empty(scores.shape, device=q.device, dtype=torch.float32)
    dq_part, dk_part, db = (torch.empty_like(b) for _ in range(3))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    chunks = triton.cdiv(T, tiles["C"])
    dend = torch.empty(B * H, chunks, DK, device=q.device, dtype=torch.float32)
    _chunk_grads[(chunks, B * H)](
        k, v, b, scores, states, dstates, do, dscores, dq_part, dk_part, dv, dend, T, DK, DV, DK**-0.5,
        **(tiles | {"num_warps": 8}),
    )  # fmt: skip
    _block_grads[(triton.cdiv(T, 16), B * H)](
        q, k, b, dscores, dq_part, dk_part, dq, dk, db, T, DK, C=tiles["C"], SUB=16, BLOCK_K=tiles["BLOCK_K"],
        num_warps=4,
    )  # fmt: skip
    if not need_g:
        return dq, dk, dv, None
    dg = torch.empty(q.shape, device=q.device, dtype=gate_dtype)
    _later_sums[(chunks, B * H)](db, dend, dg, T, DK, C=tiles["C"], BLOCK_K=tiles["BLOCK_K"], num_warps=4)
    return dq, dk, dv, dg


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 40},
    {"B": 1, "H": 1, "T": 50, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 8, "T": 2048, "K": 64, "V": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=r) for n in (K, K, V))
    # Gates undivided: 64 tokens forget by exp(-50) and more.
    g = torch.nn.functional.logsigmoid(torch.randn(B, H, T, K, generator=r))
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (q, k, v, g))


def reference(q, k, v, g):
    # Chunks of 16 tokens: differences of b inside, all chunks at once, and a loop over the states between them.
    B, H, T, DK = q.shape
    chunks = -(-T // 16)
    qc, kc, vc, gc = (
        torch.nn.functional.pad(x, (0, 0, 0, chunks * 16 - T)).view(B, H, chunks, 16, -1) for x in (q, k, v, g)
    )
    b = gc.float().cumsum(3)
    scores = torch.stack(
        [(qc * kc[..., j : j + 1, :] * (b - b[..., j : j + 1, :]).clamp(max=0.0).exp()).sum(-1) for j in range(16)], -1
    ).tril()
    ending = (kc * (b[..., -1:, :] - b).exp()).to(v.dtype).transpose(-1, -2) @ vc
    state, states = torch.zeros_like(ending[:, :, 0], dtype=torch.float32), []
    for chunk in range(chunks):
        states.append(state)
        state = b[:, :, chunk, -1, :, None].exp() * state + ending[:, :, chunk]
    inter = (qc * b.exp()).to(v.dtype) @ torch.stack(states, 2).to(v.dtype)
    out = (scores.to(v.dtype) @ vc).float() + inter
    return (out * DK**-0.5).view(B, H, chunks * 16, -1)[:, :, :T].to(v.dtype)
