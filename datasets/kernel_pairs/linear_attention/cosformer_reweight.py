"""cosFormer: linear attention whose weights fall with the distance as a cosine, carried by two feature streams.

    o_i = sum over j <= i of w_ij v_j / sum over j <= i of w_ij,    w_ij = relu(q_i) . relu(k_j) cos(omega (i - j))

cos(a - b) = cos a cos b + sin a sin b: with the streams relu(q) cos, relu(q) sin and the same of k the weights are a
product of features, so that the past is two states and two sums of keys. Inside a chunk the cosine of the distance is
used directly. Backward, with dn = do / den and dden = -(do . o) / den, numerator and denominator are one product of
the features with (v, 1): its states run forward, those of its gradient run back, and the relus gate dq and dk.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cosformer_reweight",
    "family": "linear_attention",
    "op": "cosformer_attention",
    "schema": 1,
    "techniques": ("chunked", "checkpointed-states", "reverse-scan", "saved-output", "recompute", "prologue-fusion"),
    "saves": (
        "o: fp32 or bf16 (B, H, T, V)", "den: fp32 (B, H, T)", "states: fp32 (2, B * H, chunks, K, V)",
        "sums: fp32 (2, B * H, chunks, K)",
    ),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _chunk_rows(X, head, chunk, T, WIDTH, col, C: tl.constexpr, COLS: tl.constexpr):
    t = chunk * C + tl.arange(0, C)
    d = col + tl.arange(0, COLS)
    inside = (t[:, None] < T) & (d[None, :] < WIDTH)
    return tl.load(X + (head * T + t[:, None]) * WIDTH + d[None, :], mask=inside, other=0.0)


@triton.jit
def _relu(x):
    return tl.where(x > 0.0, x, 0.0).to(x.dtype)


@triton.jit
def _angles(chunk, omega, C: tl.constexpr):
    # Below pi / 2 over the whole sequence: no range reduction is needed.
    return (chunk * C + tl.arange(0, C)).to(tl.float32) * omega


@triton.jit
def _near_cosines(omega, C: tl.constexpr):
    """cos(omega (i - j)) for i >= j in a chunk, else 0."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] >= i[None, :], tl.cos((i[:, None] - i[None, :]).to(tl.float32) * omega), 0.0)


@triton.jit
def _stream_states(
    A, V, Scale, Den, States, Sums, T, DK, DV, omega, heads, FROM_END: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # What earlier chunks (FROM_END: later ones) hand on: sums of relu(a) cos times v and times 1, and of relu(a) sin.
    # FROM_END the rows are dn = do / den and dden = -delta / den instead of v and 1; Scale holds delta.
    head = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK_V
    i = tl.arange(0, BLOCK_K)
    j = col + tl.arange(0, BLOCK_V)
    t = tl.arange(0, C)
    in_state = (i[:, None] < DK) & (j[None, :] < DV)
    cosines = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    sines = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    cos_sum = tl.zeros((BLOCK_K,), tl.float32)
    sin_sum = tl.zeros((BLOCK_K,), tl.float32)
    chunks = tl.cdiv(T, C)
    for step in range(chunks):
        chunk = step
        if FROM_END:
            chunk = chunks - 1 - step
        row = head * chunks + chunk
        at = (row * DK + i[:, None]) * DV + j[None, :]
        tl.store(States + at, cosines, mask=in_state)
        tl.store(States + heads * chunks * DK * DV + at, sines, mask=in_state)
        if col == 0:
            tl.store(Sums + row * DK + i, cos_sum, mask=i < DK)
            tl.store(Sums + heads * chunks * DK + row * DK + i, sin_sum, mask=i < DK)
        a = _relu(_chunk_rows(A, head, chunk, T, DK, 0, C, BLOCK_K)).to(tl.float32)
        v = _chunk_rows(V, head, chunk, T, DV, col, C, BLOCK_V)
        angle = _angles(chunk, omega, C)
        a_cos, a_sin = a * tl.cos(angle)[:, None], a * tl.sin(angle)[:, None]
        if FROM_END:
            in_t = chunk * C + t < T
            inv = 1.0 / tl.load(Den + head * T + chunk * C + t, mask=in_t, other=1.0)
            dden = -tl.load(Scale + head * T + chunk * C + t, mask=in_t, other=0.0) * inv
            v = (v * inv[:, None]).to(A.dtype.element_ty)
            cos_sum += tl.sum(a_cos * dden[:, None], 0)
            sin_sum += tl.sum(a_sin * dden[:, None], 0)
        else:
            cos_sum += tl.sum(a_cos, 0)
            sin_sum += tl.sum(a_sin, 0)
        cosines = tl.dot(tl.trans(a_cos.to(v.dtype)), v, cosines)
        sines = tl.dot(tl.trans(a_sin.to(v.dtype)), v, sines)


@triton.jit
def _state_of(States, row, DK, DV, col, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_K)
    j = col + tl.arange(0, BLOCK_V)
    at = (row * DK + i[:, None]) * DV + j[None, :]
    return tl.load(States + at, mask=(i[:, None] < DK) & (j[None, :] < DV), other=0.0)


@triton.jit
def _cosformer_out(
    Q, K, V, States, Sums, Out, Den, T, DK, DV, omega, heads, eps,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    row = head * chunks + chunk
    i = tl.arange(0, BLOCK_K)
    t = chunk * C + tl.arange(0, C)
    q = _relu(_chunk_rows(Q, head, chunk, T, DK, 0, C, BLOCK_K))
    k = _relu(_chunk_rows(K, head, chunk, T, DK, 0, C, BLOCK_K))
    angle = _angles(chunk, omega, C)
    q_cos, q_sin = q * tl.cos(angle)[:, None], q * tl.sin(angle)[:, None]
    near = tl.dot(q, tl.trans(k)) * _near_cosines(omega, C)
    cos_sum = tl.load(Sums + row * DK + i, mask=i < DK, other=0.0)
    sin_sum = tl.load(Sums + heads * chunks * DK + row * DK + i, mask=i < DK, other=0.0)
    den = eps + tl.sum(near, 1) + tl.sum(q_cos * cos_sum[None, :] + q_sin * sin_sum[None, :], 1)
    tl.store(Den + head * T + t, den, mask=t < T)
    for col in range(0, DV, BLOCK_V):
        v = _chunk_rows(V, head, chunk, T, DV, col, C, BLOCK_V)
        out = tl.dot(near.to(v.dtype), v)
        out = tl.dot(q_cos.to(v.dtype), _state_of(States, row, DK, DV, col, BLOCK_K, BLOCK_V).to(v.dtype), out)
        sines = _state_of(States + heads * chunks * DK * DV, row, DK, DV, col, BLOCK_K, BLOCK_V)
        out = tl.dot(q_sin.to(v.dtype), sines.to(v.dtype), out) / den[:, None]
        d = col + tl.arange(0, BLOCK_V)
        tl.store(Out + (head * T + t[:, None]) * DV + d[None, :], out, mask=(t[:, None] < T) & (d[None, :] < DV))


def _tiles(q):
    return {
        "C": 16 if q.shape[2] <= 128 else 64, "BLOCK_K": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_V": 16 if q.shape[2] <= 128 else 32, "num_warps": 4,
    }  # fmt: skip


def _run_states(a, v, scale, den, period, from_end):
    """(states, sums) of both streams: cosines first."""
    (B, H, T, DK), DV = a.shape, v.shape[3]
    tiles = _tiles(a)
    chunks = triton.cdiv(T, tiles["C"])
    states = torch.empty(2, B * H, chunks, DK, DV, device=a.device, dtype=torch.float32)
    sums = torch.empty(2, B * H, chunks, DK, device=a.device, dtype=torch.float32)
    _stream_states[(triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](
        a, v, scale, den, states, sums, T, DK, DV, 1.5707963267948966 / period, B * H, FROM_END=from_end, **tiles
    )
    return states, sums


def forward(q, k, v, period, eps=1e-4):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    if period < T:
        raise ValueError(f"the cosine turns negative beyond {period} positions, and there are {T}")
    o = torch.empty_like(v)
    den = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    # Neither scale nor denominator is read on the way forward.
    states, sums = _run_states(k, v, den, den, period, from_end=False)
    _cosformer_out[(states.shape[2], B * H)](
        q, k, v, states, sums, o, den, T, DK, DV, 1.5707963267948966 / period, B * H, eps, **_tiles(q)
    )
    return o, (q, k, v, o, den, states, sums, period)


# --- backward ---
@triton.jit
def _row_deltas(Out, DO, Delta, rows, DV, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_V)
    inside = (r[:, None] < rows) & (d[None, :] < DV)
    o = tl.load(Out + r[:, None] * DV + d[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(DO + r[:, None] * DV + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(Delta + r, tl.sum(o * do, 1), mask=r < rows)


@triton.jit
def _cosformer_grads(
    Q, K, V, DO, Den, Delta, States, Sums, DStates, DSums, DQ, DKey, DVal, T, DK, DV, omega, heads,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    row = head * chunks + chunk
    other_stream = heads * chunks * DK
    i = tl.arange(0, BLOCK_K)
    t = chunk * C + tl.arange(0, C)
    angle = _angles(chunk, omega, C)
    cos, sin = tl.cos(angle)[:, None], tl.sin(angle)[:, None]
    q = _relu(_chunk_rows(Q, head, chunk, T, DK, 0, C, BLOCK_K))
    k = _relu(_chunk_rows(K, head, chunk, T, DK, 0, C, BLOCK_K))
    k_cos, k_sin = (k * cos).to(k.dtype), (k * sin).to(k.dtype)
    inv = 1.0 / tl.load(Den + head * T + t, mask=t < T, other=1.0)
    dden = -tl.load(Delta + head * T + t, mask=t < T, other=0.0) * inv
    near = (tl.dot(q, tl.trans(k)) * _near_cosines(omega, C)).to(q.dtype)
    # dw_ij = dn_i . v_j + dden_i, in the chunk; of the other chunks through the streams.
    dnear = tl.zeros((C, C), tl.float32) + dden[:, None]
    sums = Sums + row * DK + i
    dsums = DSums + row * DK + i
    dq_cos = dden[:, None] * tl.load(sums, mask=i < DK, other=0.0)[None, :]
    dq_sin = dden[:, None] * tl.load(sums + other_stream, mask=i < DK, other=0.0)[None, :]
    dk_cos = tl.zeros((C, BLOCK_K), tl.float32) + tl.load(dsums, mask=i < DK, other=0.0)[None, :]
    dk_sin = tl.zeros((C, BLOCK_K), tl.float32) + tl.load(dsums + other_stream, mask=i < DK, other=0.0)[None, :]
    for col in range(0, DV, BLOCK_V):
        v = _chunk_rows(V, head, chunk, T, DV, col, C, BLOCK_V)
        dn = (_chunk_rows(DO, head, chunk, T, DV, col, C, BLOCK_V) * inv[:, None]).to(v.dtype)
        dnear = tl.dot(dn, tl.trans(v), dnear)
        state = _state_of(States, row, DK, DV, col, BLOCK_K, BLOCK_V).to(v.dtype)
        dq_cos = tl.dot(dn, tl.trans(state), dq_cos)
        state = _state_of(States + other_stream * DV, row, DK, DV, col, BLOCK_K, BLOCK_V).to(v.dtype)
        dq_sin = tl.dot(dn, tl.trans(state), dq_sin)
        dv = tl.dot(tl.trans(near), dn)
        state = _state_of(DStates, row, DK, DV, col, BLOCK_K, BLOCK_V).to(v.dtype)
        dk_cos = tl.dot(v, tl.trans(state), dk_cos)
        dv = tl.dot(k_cos, state, dv)
        state = _state_of(DStates + other_stream * DV, row, DK, DV, col, BLOCK_K, BLOCK_V).to(v.dtype)
        dk_sin = tl.dot(v, tl.trans(state), dk_sin)
        dv = tl.dot(k_sin, state, dv)
        d = col + tl.arange(0, BLOCK_V)
        tl.store(DVal + (head * T + t[:, None]) * DV + d[None, :], dv, mask=(t[:, None] < T) & (d[None, :] < DV))
    dnear = (dnear * _near_cosines(omega, C)).to(q.dtype)
    at = (head * T + t[:, None]) * DK + i[None, :]
    inside = (t[:, None] < T) & (i[None, :] < DK)
    # relu has passed what is positive.
    dq = tl.dot(dnear, k, dq_cos * cos + dq_sin * sin)
    tl.store(DQ + at, tl.where(q > 0.0, dq, 0.0), mask=inside)
    dk = tl.dot(tl.trans(dnear), q, dk_cos * cos + dk_sin * sin)
    tl.store(DKey + at, tl.where(k > 0.0, dk, 0.0), mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, o, den, states, sums, period = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    # Read by three launches, in tiles: one copy serves them all.
    do = grad_o.contiguous()
    delta = torch.empty_like(den)
    _row_deltas[(triton.cdiv(B * H * T, 32),)](o, do, delta, B * H * T, DV, ROWS=32, BLOCK_V=triton.next_power_of_2(DV))
    dstates, dsums = _run_states(q, do, delta, den, period, from_end=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tiles = _tiles(q)
    _cosformer_grads[(states.shape[2], B * H)](
        q, k, v, do, den, delta, states, sums, dstates, dsums, dq, dk, dv, T, DK, DV, 1.5707963267948966 / period,
        B * H, **(tiles | {"num_warps": 8 if tiles["C"] == 64 else 4}),
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 40},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (K, K, V))
    # Some queries may have no positive channel in common with a key: the denominator keeps its eps.
    return q + 0.5, k + 0.5, v, T


def reference(q, k, v, period, eps=1e-4):
    T = q.shape[2]
    angle = torch.arange(T, device=q.device, dtype=torch.float32)[:, None] * (1.5707963267948966 / period)
    q, k = torch.relu(q), torch.relu(k)
    streams = [((q * f).to(v.dtype), (k * f).to(v.dtype)) for f in (angle.cos(), angle.sin())]
    # Chunks of 64 tokens: products inside, running sums of k^T (v, 1) before.
    C = 64
    pad = -T % C
    values = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    q_all, k_all = (torch.cat(x, -1) for x in zip(*streams, strict=True))
    q_all, k_all, values = (
        torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, C)) for x in (q_all, k_all, values)
    )
    states = (k_all.transpose(-1, -2) @ values).float()
    before = (states.cumsum(2) - states).to(v.dtype)
    both = (q_all @ k_all.transpose(-1, -2)).tril() @ values + q_all @ before
    both = both.flatten(2, 3)[:, :, :T].float()
    return (both[..., :-1] / (both[..., -1:] + eps)).to(v.dtype)
