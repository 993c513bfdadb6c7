"""Gated slot attention: keys and values are remembered in M slots, read by a softmax over slots between two passes.

    K_t = a_t K_(t - 1) + (1 - a_t) k_t^T,   V_t alike,   x_t = scale K_t q_t,   p_t = softmax(x_t),   o_t = V_t^T p_t

with a_t = exp(g_t) in (0, 1), one gate per slot. Both passes are gated linear attention, the first with gates on its
outputs, the second with gates on its inputs: by chunks, with b the running sum of g and w = 1 - exp(g), x is
exp(b) (tril(scale q k^T) (w exp(-b)) + q K^T), and o is tril((p exp(b)) (w exp(-b))^T) v + (p exp(b)) V. One launch
carries either state, forwards or, for its gradient, back. The backward needs the second pass done before dx is known:
dV's states, the softmax, dK's states, the rest. In both passes a gate asks row minus column, db = x dx + p dp - w dw,
and dg is the sum of db over all later tokens plus what w = 1 - exp(g) adds. A chunk's gates sum to -80 at the least.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "abc_gsa_slots",
    "family": "linear_attention",
    "op": "gated_slot_attention",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "saved-statistics", "recompute"),
    "saves": (
        "x: fp32 (B, H, T, M)", "k_states: fp32 (B * H, chunks, M, K)", "v_states: fp32 (B * H, chunks, M, V)",
    ),
    "grads": ("q", "k", "v", "g"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _rows(X, row, first, end, WIDTH, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = col + tl.arange(0, COLS)
    inside = (t[:, None] < end) & (d[None, :] < WIDTH)
    return tl.load(X + (row + t[:, None]) * WIDTH + d[None, :], mask=inside, other=0.0)


@triton.jit
def _put_rows(X, tile, row, first, end, WIDTH, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = col + tl.arange(0, COLS)
    tl.store(X + (row + t[:, None]) * WIDTH + d[None, :], tile, mask=(t[:, None] < end) & (d[None, :] < WIDTH))


@triton.jit
def _gates(G, row, first, T, M, C: tl.constexpr, BLOCK_M: tl.constexpr):
    """(b, b_end, w) of a chunk in fp32; tokens past T keep the state and write nothing."""
    g = _rows(G, row, first, T, M, 0, C, BLOCK_M).to(tl.float32)
    return tl.cumsum(g, 0), tl.sum(g, 0), 1.0 - tl.exp(g)


@triton.jit
def _softmax_of_slots(x, M, BLOCK_M: tl.constexpr):
    x = tl.where(tl.arange(0, BLOCK_M)[None, :] < M, x, float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def _slot_states(
    X, G, Readers, States, T, WIDTH, M, scale, READERS: tl.constexpr, C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    # (M, WIDTH) states. READERS 0: what tokens before each chunk have written. Else the gradient of that from the
    # tokens behind: those read slots with the weights Readers (2: with their softmax).
    col = tl.program_id(0) * BLOCK_X
    head = tl.program_id(1).to(tl.int64)
    state = tl.zeros((BLOCK_M, BLOCK_X), tl.float32)
    chunks = tl.cdiv(T, C)
    for step in range(chunks):
        chunk = step
        if READERS:
            chunk = chunks - 1 - step
        _put_rows(States, state, (head * chunks + chunk) * M, 0, M, WIDTH, col, BLOCK_M, BLOCK_X)
        x = _rows(X, head * T, chunk * C, T, WIDTH, col, C, BLOCK_X)
        b, b_end, w = _gates(G, head * T, chunk * C, T, M, C, BLOCK_M)
        if READERS:
            weights = _rows(Readers, head * T, chunk * C, T, M, 0, C, BLOCK_M)
            if READERS == 2:
                weights = _softmax_of_slots(weights, M, BLOCK_M)
            weights = weights * tl.exp(b) * scale
        else:
            weights = w * tl.exp(b_end[None, :] - b)
        state = tl.dot(tl.trans(weights.to(x.dtype)), x, state * tl.exp(b_end)[:, None])


@triton.jit
def _slots_out(
    Q, K, V, G, KStates, VStates, X, Out, T, DK, DV, M, scale, C: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row, first = head * T, chunk * C
    state_row = (head * tl.num_programs(0) + chunk) * M
    i = tl.arange(0, C)
    lower = i[:, None] >= i[None, :]
    q = _rows(Q, row, first, T, DK, 0, C, BLOCK_K)
    k = _rows(K, row, first, T, DK, 0, C, BLOCK_K)
    b, _, w = _gates(G, row, first, T, M, C, BLOCK_M)
    written = (w * tl.exp(-b)).to(q.dtype)
    scores = tl.where(lower, tl.dot(q, tl.trans(k)), 0.0).to(q.dtype)
    k_state = _rows(KStates, state_row, 0, M, DK, 0, BLOCK_M, BLOCK_K).to(q.dtype)
    x = tl.dot(scores, written, tl.dot(q, tl.trans(k_state))) * tl.exp(b) * scale
    _put_rows(X, x, row, first, T, M, 0, C, BLOCK_M)
    read = (_softmax_of_slots(x, M, BLOCK_M) * tl.exp(b)).to(q.dtype)
    weights = tl.where(lower, tl.dot(read, tl.trans(written)), 0.0).to(q.dtype)
    for col in range(0, DV, BLOCK_V):
        v = _rows(V, row, first, T, DV, col, C, BLOCK_V)
        v_state = _rows(VStates, state_row, 0, M, DV, col, BLOCK_M, BLOCK_V).to(v.dtype)
        _put_rows(Out, tl.dot(weights, v, tl.dot(read, v_state)), row, first, T, DV, col, C, BLOCK_V)


def _tiles(q, g):
    return {
        "C": 16 if q.shape[2] <= 128 else 32, "BLOCK_M": max(16, triton.next_power_of_2(g.shape[3])), "num_warps": 4,
    }  # fmt: skip


def _run_states(x, g, readers, scale, mode):
    (B, H, T, width), M = x.shape, g.shape[3]
    tiles = _tiles(x, g)
    states = torch.empty(B * H, triton.cdiv(T, tiles["C"]), M, width, device=x.device, dtype=torch.float32)
    _slot_states[(triton.cdiv(width, 32), B * H)](
        x, g, readers, states, T, width, M, scale, READERS=mode, BLOCK_X=32, **tiles
    )
    return states


def forward(q, k, v, g):
    q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
    (B, H, T, DK), DV, M = q.shape, v.shape[3], g.shape[3]
    x = torch.empty(B, H, T, M, device=q.device, dtype=torch.float32)
    # Nobody reads on the way forward.
    k_states, v_states = _run_states(k, g, x, 1.0, 0), _run_states(v, g, x, 1.0, 0)
    out = torch.empty_like(v)
    _slots_out[(k_states.shape[1], B * H)](
        q, k, v, g, k_states, v_states, x, out, T, DK, DV, M, DK**-0.5,
        BLOCK_K=max(16, triton.next_power_of_2(DK)), BLOCK_V=32, **_tiles(q, g),
    )  # fmt: skip
    return out, (q, k, v, g, x, k_states, v_states)


# --- backward ---
@triton.jit
def _through_softmax(
    V, G, X, VStates, DO, DX, DB, T, DV, M, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr
):
    # dp from the second pass, dx by the softmax, and p dp, the second pass's share of db.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row, first = head * T, chunk * C
    state_row = (head * tl.num_programs(0) + chunk) * M
    i = tl.arange(0, C)
    dweights = tl.zeros((C, C), tl.float32)
    dread = tl.zeros((C, BLOCK_M), tl.float32)
    for col in range(0, DV, BLOCK_V):
        v = _rows(V, row, first, T, DV, col, C, BLOCK_V)
        do = _rows(DO, row, first, T, DV, col, C, BLOCK_V)
        dweights = tl.dot(do, tl.trans(v), dweights)
        v_state = _rows(VStates, state_row, 0, M, DV, col, BLOCK_M, BLOCK_V).to(v.dtype)
        dread = tl.dot(do, tl.trans(v_state), dread)
    b, _, w = _gates(G, row, first, T, M, C, BLOCK_M)
    dweights = tl.where(i[:, None] >= i[None, :], dweights, 0.0)
    written = (w * tl.exp(-b)).to(V.dtype.element_ty)
    dp = tl.dot(dweights.to(written.dtype), written, dread) * tl.exp(b)
    p = _softmax_of_slots(_rows(X, row, first, T, M, 0, C, BLOCK_M), M, BLOCK_M)
    kept = p * dp
    _put_rows(DB, kept, row, first, T, M, 0, C, BLOCK_M)
    _put_rows(DX, kept - p * tl.sum(kept, 1)[:, None], row, first, T, M, 0, C, BLOCK_M)


@triton.jit
def _slot_grads(
    Q, K, V, G, X, KStates, DKStates, DVStates, DO, DX, DB, DW, DQ, DKey, DVal, T, DK, DV, M, scale,
    C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row, first = head * T, chunk * C
    state_row = (head * tl.num_programs(0) + chunk) * M
    i = tl.arange(0, C)
    lower = i[:, None] >= i[None, :]
    b, b_end, w = _gates(G, row, first, T, M, C, BLOCK_M)
    x = _rows(X, row, first, T, M, 0, C, BLOCK_M)
    dtype = Q.dtype.element_ty
    written = (w * tl.exp(-b)).to(dtype)
    ending = (w * tl.exp(b_end[None, :] - b)).to(dtype)
    read = (_softmax_of_slots(x, M, BLOCK_M) * tl.exp(b)).to(dtype)

    # Second pass: values, and what its weights and states ask of the writes.
    weights = tl.where(lower, tl.dot(read, tl.trans(written)), 0.0).to(dtype)
    dweights = tl.zeros((C, C), tl.float32)
    dending = tl.zeros((C, BLOCK_M), tl.float32)
    for col in range(0, DV, BLOCK_V):
        v = _rows(V, row, first, T, DV, col, C, BLOCK_V)
        do = _rows(DO, row, first, T, DV, col, C, BLOCK_V)
        dv_state = _rows(DVStates, state_row, 0, M, DV, col, BLOCK_M, BLOCK_V).to(dtype)
        dweights = tl.dot(do, tl.trans(v), dweights)
        dending = tl.dot(v, tl.trans(dv_state), dending)
        dv = tl.dot(tl.trans(weights), do, tl.dot(ending, dv_state))
        _put_rows(DVal, dv, row, first, T, DV, col, C, BLOCK_V)
    dweights = tl.where(lower, dweights, 0.0).to(dtype)
    dwritten = tl.dot(tl.trans(dweights), read)

    # First pass: queries and keys, and the rest of the writes.
    q = _rows(Q, row, first, T, DK, 0, C, BLOCK_K)
    k = _rows(K, row, first, T, DK, 0, C, BLOCK_K)
    dx = _rows(DX, row, first, T, M, 0, C, BLOCK_M)
    asked = (dx * tl.exp(b) * scale).to(dtype)
    scores = tl.where(lower, tl.dot(q, tl.trans(k)), 0.0).to(dtype)
    dwritten = tl.dot(tl.trans(scores), asked, dwritten)
    dscores = tl.where(lower, tl.dot(asked, tl.trans(written)), 0.0).to(dtype)
    k_state = _rows(KStates, state_row, 0, M, DK, 0, BLOCK_M, BLOCK_K).to(dtype)
    _put_rows(DQ, tl.dot(dscores, k, tl.dot(asked, k_state)), row, first, T, DK, 0, C, BLOCK_K)
    dk_state = _rows(DKStates, state_row, 0, M, DK, 0, BLOCK_M, BLOCK_K).to(dtype)
    dending = tl.dot(k, tl.trans(dk_state), dending)
    _put_rows(DKey, tl.dot(tl.trans(dscores), q, tl.dot(ending, dk_state)), row, first, T, DK, 0, C, BLOCK_K)

    dw = dwritten * tl.exp(-b) + dending * tl.exp(b_end[None, :] - b)
    _put_rows(DW, dw, row, first, T, M, 0, C, BLOCK_M)
    db = _rows(DB, row, first, T, M, 0, C, BLOCK_M) + x * dx - w * dw
    _put_rows(DB, db, row, first, T, M, 0, C, BLOCK_M)


@triton.jit
def _gate_grads(DB, DW, G, DG, T, M, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * T
    col = tl.program_id(0) * COLS
    carry = tl.zeros((COLS,), tl.float32)
    for back in range(tl.cdiv(T, ROWS)):
        first = (tl.cdiv(T, ROWS) - 1 - back) * ROWS
        db = _rows(DB, row, first, T, M, col, ROWS, COLS)
        g = _rows(G, row, first, T, M, col, ROWS, COLS).to(tl.float32)
        own = tl.exp(g) * _rows(DW, row, first, T, M, col, ROWS, COLS)
        dg = tl.cumsum(db, 0, reverse=True) + carry[None, :] - own
        _put_rows(DG, dg, row, first, T, M, col, ROWS, COLS)
        carry += tl.sum(db, 0)


def backward(saved, grad_out, needs=None):
    q, k, v, g, x, k_states, v_states = saved
    (B, H, T, DK), DV, M = q.shape, v.shape[3], g.shape[3]
    tiles, scale = _tiles(q, g), DK**-0.5
    grid = (k_states.shape[1], B * H)
    # Read by three launches, in tiles: one copy serves them all.
    do = grad_out.contiguous()
    dx, db, dw = (torch.empty_like(x) for _ in range(3))
    dq, dk, dv, dg = (torch.empty_like(t) for t in (q, k, v, g))
    dv_states = _run_states(do, g, x, 1.0, 2)
    _through_softmax[grid](v, g, x, v_states, do, dx, db, T, DV, M, BLOCK_V=32, **tiles)
    dk_states = _run_states(q, g, dx, scale, 1)
    _slot_grads[grid](
        q, k, v, g, x, k_states, dk_states, dv_states, do, dx, db, dw, dq, dk, dv, T, DK, DV, M, scale,
        BLOCK_K=max(16, triton.next_power_of_2(DK)), BLOCK_V=16, **(tiles | {"num_warps": 8}),
    )  # fmt: skip
    _gate_grads[(triton.cdiv(M, 16), B * H)](db, dw, g, dg, T, M, ROWS=64, COLS=16, num_warps=4)
    return dq, dk, dv, dg


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32, "M": 16},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 40, "M": 10},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "M": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 8, "T": 2048, "K": 64, "V": 64, "M": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, M, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=r) for n in (K, K, V))
    g = torch.nn.functional.logsigmoid(torch.randn(B, H, T, M, generator=r)) / 8
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (q, k, v, g))


def reference(q, k, v, g):
    # Chunks of 64 tokens, all in parallel but for the two states, which a loop over chunks carries.
    T, dtype, scale = q.shape[2], q.dtype, q.shape[-1] ** -0.5
    pad = -T % 64
    q, k, v, g = (torch.nn.functional.pad(t, (0, 0, 0, pad)).unflatten(2, (-1, 64)) for t in (q, k, v, g))
    g = g.float()
    b, w = g.cumsum(3), 1.0 - g.exp()
    written = (w * (-b).exp()).to(dtype)
    ending = (w * (b[..., -1:, :] - b).exp()).to(dtype).transpose(-1, -2)
    added = ending @ torch.cat((k, v), -1)
    state, states = torch.zeros_like(added[:, :, 0], dtype=torch.float32), []
    for chunk in range(b.shape[2]):
        states.append(state)
        state = b[:, :, chunk, -1, :, None].exp() * state + added[:, :, chunk]
    k_state, v_state = torch.stack(states, 2).to(dtype).split((k.shape[-1], v.shape[-1]), -1)
    x = ((q @ k.transpose(-1, -2)).tril() @ written + q @ k_state.transpose(-1, -2)).float() * b.exp() * scale
    read = (x.softmax(-1) * b.exp()).to(dtype)
    out = (read @ written.transpose(-1, -2)).tril() @ v + read @ v_state
    return out.flatten(2, 3)[:, :, :T]
