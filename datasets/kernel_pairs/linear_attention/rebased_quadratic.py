"""ReBased: squared products of affinely mapped queries and keys, by chunks, with states over the K x K features.

    w_ij = (q'_i . k'_j)^2,  q' = scale (gain_q q + shift_q),  k' = gain_k k + shift_k,    o_i = sum w v / (sum w + eps)

Inside a chunk the square of a score is the weight, and 2 s its derivative; between chunks (q . k)^2 is the product of
the features q (x) q and k (x) k, built in registers from 16 channels. The states sum k (x) k times (v, 1) and, from
the end, q (x) q times (dn, dden) with dn = do / den, dden = -dn . o. Both are symmetric in the two feature indices:
hence dq'_a = 2 sum over b of dF_ab q'_b. The affine maps of a head get one partial row per chunk.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rebased_quadratic",
    "family": "linear_attention",
    "op": "rebased_attention",
    "schema": 1,
    "techniques": (
        "chunked", "checkpointed-states", "reverse-scan", "prologue-fusion", "broadcast-reduction",
        "two-stage-partials", "saved-output", "recompute",
    ),
    "saves": (
        "o: fp32 or bf16 (B, H, T, V)", "den: fp32 (B, H, T)", "states: fp32 (B * H, chunks, 256, V)",
        "sums: fp32 (B * H, chunks, 256)",
    ),
    "grads": ("q", "k", "v", "gains", "shifts"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _chunk_rows(X, head, chunk, T, WIDTH, first, C: tl.constexpr, COLS: tl.constexpr):
    t = chunk * C + tl.arange(0, C)
    d = first + tl.arange(0, COLS)
    inside = (t[:, None] < T) & (d[None, :] < WIDTH)
    return tl.load(X + (head * T + t[:, None]) * WIDTH + d[None, :], mask=inside, other=0.0)


@triton.jit
def _affine(X, Gains, Shifts, which, head, chunk, T, H, D, scale, C: tl.constexpr, BLOCK_K: tl.constexpr):
    """scale (gain x + shift) of a chunk in fp32, zeros past T. Gains and shifts are (2, H, D): of q, then of k."""
    x = _chunk_rows(X, head, chunk, T, D, 0, C, BLOCK_K).to(tl.float32)
    c = tl.arange(0, BLOCK_K)
    at = (which * H + head % H) * D + c
    gain = tl.load(Gains + at, mask=c < D, other=0.0).to(tl.float32)
    shift = tl.load(Shifts + at, mask=c < D, other=0.0).to(tl.float32)
    t = chunk * C + tl.arange(0, C)
    return tl.where(t[:, None] < T, scale * (x * gain[None, :] + shift[None, :]), 0.0)


@triton.jit
def _squared_features(x, C: tl.constexpr, BLOCK_K: tl.constexpr):
    return tl.reshape(x[:, :, None] * x[:, None, :], (C, BLOCK_K * BLOCK_K))


@triton.jit
def _feature_states(
    A, V, Ones, Gains, Shifts, States, Sums, T, H, D, DV, scale, WHICH: tl.constexpr, FROM_END: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # What earlier chunks hand on: features of k times v, and times 1. FROM_END, later ones: of q times dn and dden.
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_V
    f = tl.arange(0, BLOCK_K * BLOCK_K)
    j = first + tl.arange(0, BLOCK_V)
    state = tl.zeros((BLOCK_K * BLOCK_K, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_K * BLOCK_K,), tl.float32)
    chunks = tl.cdiv(T, C)
    for step in range(chunks):
        chunk = step
        if FROM_END:
            chunk = chunks - 1 - step
        row = (head * chunks + chunk) * BLOCK_K * BLOCK_K
        tl.store(States + (row + f[:, None]) * DV + j[None, :], state, mask=j[None, :] < DV)
        if first == 0:
            tl.store(Sums + row + f, total)
        features = _squared_features(
            _affine(A, Gains, Shifts, WHICH, head, chunk, T, H, D, scale, C, BLOCK_K), C, BLOCK_K
        )
        if FROM_END:
            t = chunk * C + tl.arange(0, C)
            total += tl.sum(features * tl.load(Ones + head * T + t, mask=t < T, other=0.0)[:, None], 0)
        else:
            total += tl.sum(features, 0)
        v = _chunk_rows(V, head, chunk, T, DV, first, C, BLOCK_V)
        state = tl.dot(tl.trans(features.to(v.dtype)), v, state)


@triton.jit
def _state_tile(States, row, DV, first, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    f = tl.arange(0, BLOCK_K * BLOCK_K)
    j = first + tl.arange(0, BLOCK_V)
    return tl.load(States + (row + f[:, None]) * DV + j[None, :], mask=j[None, :] < DV, other=0.0)


@triton.jit
def _quadratic_out(
    Q, K, V, Gains, Shifts, States, Sums, Out, Den, T, H, D, DV, scale, eps,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    t = chunk * C + i
    row = (head * tl.num_programs(0) + chunk) * BLOCK_K * BLOCK_K
    q = _affine(Q, Gains, Shifts, 0, head, chunk, T, H, D, scale, C, BLOCK_K)
    k = _affine(K, Gains, Shifts, 1, head, chunk, T, H, D, 1.0, C, BLOCK_K)
    s = tl.dot(q.to(Q.dtype.element_ty), tl.trans(k.to(Q.dtype.element_ty)))
    w = tl.where(i[:, None] >= i[None, :], s * s, 0.0)
    features = _squared_features(q, C, BLOCK_K)
    sums = tl.load(Sums + row + tl.arange(0, BLOCK_K * BLOCK_K))
    den = eps + tl.sum(w, 1) + tl.sum(features * sums[None, :], 1)
    tl.store(Den + head * T + t, den, mask=t < T)
    features = features.to(V.dtype.element_ty)
    for first in range(0, DV, BLOCK_V):
        v = _chunk_rows(V, head, chunk, T, DV, first, C, BLOCK_V)
        state = _state_tile(States, row, DV, first, BLOCK_K, BLOCK_V).to(v.dtype)
        out = tl.dot(w.to(v.dtype), v, tl.dot(features, state)) / den[:, None]
        d = first + tl.arange(0, BLOCK_V)
        tl.store(Out + (head * T + t[:, None]) * DV + d[None, :], out, mask=(t[:, None] < T) & (d[None, :] < DV))


def _tiles(q):
    return {"C": 16 if q.shape[2] <= 128 else 32, "BLOCK_K": 16, "BLOCK_V": 16, "num_warps": 4}


def _run_states(a, v, ones, gains, shifts, scale, which, from_end):
    (B, H, T, D), DV = a.shape, v.shape[3]
    tiles = _tiles(a)
    chunks = triton.cdiv(T, tiles["C"])
    states = torch.empty(B * H, chunks, 256, DV, device=a.device, dtype=torch.float32)
    sums = torch.empty(B * H, chunks, 256, device=a.device, dtype=torch.float32)
    _feature_states[(triton.cdiv(DV, tiles["BLOCK_V"]), B * H)](
        a, v, ones, gains, shifts, states, sums, T, H, D, DV, scale, WHICH=which, FROM_END=from_end, **tiles
    )
    return states, sums


def forward(q, k, v, gains, shifts, eps=1e-3):
    q, k, v, gains, shifts = (x.contiguous() for x in (q, k, v, gains, shifts))
    (B, H, T, D), DV = q.shape, v.shape[3]
    if D > 16:
        raise ValueError(f"{D} channels have {D * D} features, more than the 256 of a state")
    o = torch.empty_like(v)
    den = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    states, sums = _run_states(k, v, den, gains, shifts, 1.0, 1, from_end=False)
    _quadratic_out[(states.shape[1], B * H)](
        q, k, v, gains, shifts, states, sums, o, den, T, H, D, DV, D**-0.5, eps, **_tiles(q)
    )
    return o, (q, k, v, gains, shifts, o, den, states, sums)


# --- backward ---
@triton.jit
def _fraction_grads(Out, DO, Den, DNum, DDen, rows, DV, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    # dn = do / den and dden = -dn . o, which the states and the chunks both read.
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_V)
    inside = (r[:, None] < rows) & (d[None, :] < DV)
    at = r[:, None] * DV + d[None, :]
    dnum = tl.load(DO + at, mask=inside, other=0.0) / tl.load(Den + r, mask=r < rows, other=1.0)[:, None]
    tl.store(DNum + at, dnum, mask=inside)
    o = tl.load(Out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DDen + r, -tl.sum(dnum * o, 1), mask=r < rows)


@triton.jit
def _through_features(dfeatures, x, C: tl.constexpr, BLOCK_K: tl.constexpr):
    """The gradient of x from that of x (x) x, which is symmetric."""
    return 2.0 * tl.sum(tl.reshape(dfeatures, (C, BLOCK_K, BLOCK_K)) * x[:, None, :], 2)


@triton.jit
def _put_affine_grads(
    dmapped, X, Gains, DX, Parts, which, head, chunk, T, H, D, scale, C: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Parts is (2 of gain and shift, 2 of q and k, B, H, chunks, D).
    c = tl.arange(0, BLOCK_K)
    t = chunk * C + tl.arange(0, C)
    x = _chunk_rows(X, head, chunk, T, D, 0, C, BLOCK_K).to(tl.float32)
    dmapped = tl.where(t[:, None] < T, dmapped * scale, 0.0)
    gain = tl.load(Gains + (which * H + head % H) * D + c, mask=c < D, other=0.0).to(tl.float32)
    at = (head * T + t[:, None]) * D + c[None, :]
    tl.store(DX + at, dmapped * gain[None, :], mask=(t[:, None] < T) & (c[None, :] < D))
    part = ((which * tl.num_programs(1) + head) * tl.num_programs(0) + chunk) * D + c
    tl.store(Parts + part, tl.sum(dmapped * x, 0), mask=c < D)
    shift_parts = Parts + 2 * tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * D
    tl.store(shift_parts + part, tl.sum(dmapped, 0), mask=c < D)


@triton.jit
def _quadratic_dq(
    Q, K, V, Gains, Shifts, DNum, DDen, States, Sums, DQ, Parts, T, H, D, DV, scale,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    t = chunk * C + i
    row = (head * tl.num_programs(0) + chunk) * BLOCK_K * BLOCK_K
    q = _affine(Q, Gains, Shifts, 0, head, chunk, T, H, D, scale, C, BLOCK_K)
    k = _affine(K, Gains, Shifts, 1, head, chunk, T, H, D, 1.0, C, BLOCK_K).to(Q.dtype.element_ty)
    dden = tl.load(DDen + head * T + t, mask=t < T, other=0.0)
    dfeatures = dden[:, None] * tl.load(Sums + row + tl.arange(0, BLOCK_K * BLOCK_K))[None, :]
    dw = tl.zeros((C, C), tl.float32) + dden[:, None]
    for first in range(0, DV, BLOCK_V):
        dnum = _chunk_rows(DNum, head, chunk, T, DV, first, C, BLOCK_V)
        v = _chunk_rows(V, head, chunk, T, DV, first, C, BLOCK_V)
        dw = tl.dot(dnum, tl.trans(v), dw)
        state = _state_tile(States, row, DV, first, BLOCK_K, BLOCK_V).to(v.dtype)
        dfeatures = tl.dot(dnum, tl.trans(state), dfeatures)
    s = tl.dot(q.to(k.dtype), tl.trans(k))
    ds = tl.where(i[:, None] >= i[None, :], 2.0 * s * dw, 0.0)
    dq = tl.dot(ds.to(k.dtype), k, _through_features(dfeatures, q, C, BLOCK_K))
    _put_affine_grads(dq, Q, Gains, DQ, Parts, 0, head, chunk, T, H, D, scale, C, BLOCK_K)


@triton.jit
def _quadratic_dk(
    Q, K, V, Gains, Shifts, DNum, DDen, DStates, DSums, DKey, Parts, T, H, D, DV, scale,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    t = chunk * C + i
    row = (head * tl.num_programs(0) + chunk) * BLOCK_K * BLOCK_K
    q = _affine(Q, Gains, Shifts, 0, head, chunk, T, H, D, scale, C, BLOCK_K).to(Q.dtype.element_ty)
    k = _affine(K, Gains, Shifts, 1, head, chunk, T, H, D, 1.0, C, BLOCK_K)
    dden = tl.load(DDen + head * T + t, mask=t < T, other=0.0)
    dw = tl.zeros((C, C), tl.float32) + dden[:, None]
    dsums = tl.load(DSums + row + tl.arange(0, BLOCK_K * BLOCK_K))
    dfeatures = tl.zeros((C, BLOCK_K * BLOCK_K), tl.float32) + dsums[None, :]
    for first in range(0, DV, BLOCK_V):
        dnum = _chunk_rows(DNum, head, chunk, T, DV, first, C, BLOCK_V)
        v = _chunk_rows(V, head, chunk, T, DV, first, C, BLOCK_V)
        dw = tl.dot(dnum, tl.trans(v), dw)
        dstate = _state_tile(DStates, row, DV, first, BLOCK_K, BLOCK_V).to(v.dtype)
        dfeatures = tl.dot(v, tl.trans(dstate), dfeatures)
    s = tl.dot(q, tl.trans(k.to(q.dtype)))
    ds = tl.where(i[:, None] >= i[None, :], 2.0 * s * dw, 0.0).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, _through_features(dfeatures, k, C, BLOCK_K))
    _put_affine_grads(dk, K, Gains, DKey, Parts, 1, head, chunk, T, H, D, 1.0, C, BLOCK_K)


@triton.jit
def _quadratic_dv(
    Q, K, Gains, Shifts, DNum, DStates, DVal, T, H, D, DV, scale,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # A launch of its own: the features as an operand beside their gradient would not fit the registers.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * BLOCK_V
    i = tl.arange(0, C)
    row = (head * tl.num_programs(0) + chunk) * BLOCK_K * BLOCK_K
    q = _affine(Q, Gains, Shifts, 0, head, chunk, T, H, D, scale, C, BLOCK_K).to(Q.dtype.element_ty)
    k = _affine(K, Gains, Shifts, 1, head, chunk, T, H, D, 1.0, C, BLOCK_K)
    s = tl.where(i[:, None] >= i[None, :], tl.dot(q, tl.trans(k.to(q.dtype))), 0.0)
    dnum = _chunk_rows(DNum, head, chunk, T, DV, first, C, BLOCK_V)
    dstate = _state_tile(DStates, row, DV, first, BLOCK_K, BLOCK_V).to(dnum.dtype)
    dv = tl.dot(_squared_features(k, C, BLOCK_K).to(dnum.dtype), dstate)
    dv = tl.dot(tl.trans((s * s).to(dnum.dtype)), dnum, dv)
    t = chunk * C + i
    d = first + tl.arange(0, BLOCK_V)
    tl.store(DVal + (head * T + t[:, None]) * DV + d[None, :], dv, mask=(t[:, None] < T) & (d[None, :] < DV))


def backward(saved, grad_o, needs=None):
    q, k, v, gains, shifts, o, den, states, sums = saved
    (B, H, T, D), DV = q.shape, v.shape[3]
    tiles = _tiles(q)
    chunks, scale = states.shape[1], D**-0.5
    dnum, dden = torch.empty_like(v), torch.empty_like(den)
    # The rows of all heads are one axis, which takes a dense cotangent.
    _fraction_grads[(triton.cdiv(B * H * T, 32),)](
        o, grad_o.contiguous(), den, dnum, dden, B * H * T, DV, ROWS=32, BLOCK_V=triton.next_power_of_2(DV)
    )
    dstates, dsums = _run_states(q, dnum, dden, gains, shifts, scale, 0, from_end=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    parts = torch.empty(2, 2, B, H, chunks, D, device=q.device, dtype=torch.float32)
    common = (q, k, v, gains, shifts, dnum, dden)
    _quadratic_dq[(chunks, B * H)](*common, states, sums, dq, parts, T, H, D, DV, scale, **tiles)
    _quadratic_dk[(chunks, B * H)](*common, dstates, dsums, dk, parts, T, H, D, DV, scale, **tiles)
    _quadratic_dv[(chunks, B * H, triton.cdiv(DV, tiles["BLOCK_V"]))](
        q, k, gains, shifts, dnum, dstates, dv, T, H, D, DV, scale, **tiles
    )
    dgains, dshifts = parts.sum((2, 4))
    return dq, dk, dv, dgains.to(gains.dtype), dshifts.to(shifts.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 40},
    {"B": 1, "H": 2, "T": 33, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "K": 16, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    if K > 16:
        raise ValueError("at most 16 channels")
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g) for n in (K, K, V))
    gains, shifts = 1.0 + 0.2 * torch.randn(2, H, K, generator=g), 0.2 * torch.randn(2, H, K, generator=g)
    return tuple(x.to(device, getattr(torch, dtype)) for x in (q, k, v, gains, shifts))


def reference(q, k, v, gains, shifts, eps=1e-3):
    q, k = (x * gains[i][:, None] + shifts[i][:, None] for i, x in enumerate((q, k)))
    s = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).float()
    w = (s * s).tril()
    return ((w.to(v.dtype) @ v).float() / (w.sum(-1, keepdim=True) + eps)).to(v.dtype)
