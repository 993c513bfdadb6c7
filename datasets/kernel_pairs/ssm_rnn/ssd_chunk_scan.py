"""Mamba-2 inside a chunk: y = (C B^T with decays) x, whose decays' gradients end in a reverse cumsum.

With S[l, s] = c[l] b[s] for a group of heads, A = cumsum(da) and W[l, s] = S exp(A[l] - A[s]) dt[s] for s <= l,

    y = W x,    dx = W^T dy,    dW = dy x^T,    dS = sum over the heads of dW exp(A[l] - A[s]) dt[s],
    dc = dS b,  db = dS^T c,    dA[l] += dW W over s < l,   dA[s] -= dW W over l > s,   dda = reverse cumsum of dA.

S is the same for all heads of a group: the forward keeps its lower triangle. Backwards one launch owns tile pairs of dS
and loops over the heads, which leaves dS summed and the row sums of dW W; one owns tiles of steps of a head and looks
ahead in time, for dx, ddt and the column sums; one turns dS into dc, looking back, and db, looking ahead, so that all
of its programs work alike; a last one sums along the chunk. Pairs above the diagonal are never visited, and pairs on it
do not enter dA, where they would only cancel.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ssd_chunk_scan",
    "family": "ssm_rnn",
    "op": "ssd_chunk_scan",
    "schema": 1,
    "techniques": (
        "chunked", "causal-bounds", "head-reduction", "owner-grid", "reverse-scan", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("scores: fp32 (B, chunks, G, LEN, LEN)", "sums: fp32 (B, H, chunks, LEN)"),
    "grads": ("x", "b", "c", "dt", "da"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _decay_sums(DecayLogs, Sums, LEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * LEN
    step = tl.arange(0, BLOCK)
    da = tl.load(DecayLogs + row + step, mask=step < LEN, other=0.0)
    tl.store(Sums + row + step, tl.cumsum(da, 0), mask=step < LEN)


@triton.jit
def _group_scores(Bs, Cs, Scores, G, LEN: tl.constexpr, N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr):
    if tl.program_id(2) > tl.program_id(1):
        return
    owner = tl.program_id(0).to(tl.int64)
    late = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    early = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    n = tl.arange(0, BLOCK_N)
    base = (owner // G * LEN * G + owner % G) * N
    c_at = Cs + base + late[:, None] * (G * N) + n[None, :]
    b_at = Bs + base + early[None, :] * (G * N) + n[:, None]
    c = tl.load(c_at, mask=(late[:, None] < LEN) & (n[None, :] < N), other=0.0)
    b = tl.load(b_at, mask=(early[None, :] < LEN) & (n[:, None] < N), other=0.0)
    at = (owner * LEN + late[:, None]) * LEN + early[None, :]
    tl.store(Scores + at, tl.dot(c, b), mask=(late[:, None] < LEN) & (early[None, :] < LEN))


@triton.jit
def _pair_decay(Sums, Dt, row, late, early, LEN: tl.constexpr):
    """exp(A[late] - A[early]), zero above the diagonal, as (late, early), and dt of the early steps."""
    a_late = tl.load(Sums + row + late, mask=late < LEN, other=0.0)
    a_early = tl.load(Sums + row + early, mask=early < LEN, other=0.0)
    seen = (late[:, None] >= early[None, :]) & (late[:, None] < LEN)
    # The difference is positive above the diagonal, where exp could overflow.
    decay = tl.exp(tl.where(seen, a_late[:, None] - a_early[None, :], -1.0e30))
    return decay, tl.load(Dt + row + early, mask=early < LEN, other=0.0)


@triton.jit
def _chunk_scan_fwd(
    X, Dt, Sums, Scores, Y, H, G, chunks, LEN: tl.constexpr, P: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    cell = tl.program_id(0).to(tl.int64)
    late = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    p = tl.arange(0, BLOCK_P)
    row = ((cell // chunks * H + head) * chunks + cell % chunks) * LEN
    scores = Scores + (cell * G + head // (H // G)) * LEN * LEN
    acc = tl.zeros((BLOCK_L, BLOCK_P), tl.float32)
    for start in range(0, (tl.program_id(2) + 1) * BLOCK_L, BLOCK_L):
        early = start + tl.arange(0, BLOCK_L)
        decay, dt = _pair_decay(Sums, Dt, row, late, early, LEN)
        ok = (late[:, None] < LEN) & (early[None, :] < LEN)
        s = tl.load(scores + late[:, None] * LEN + early[None, :], mask=ok, other=0.0)
        x_at = X + ((cell * LEN + early[:, None]) * H + head) * P + p[None, :]
        x = tl.load(x_at, mask=(early[:, None] < LEN) & (p[None, :] < P), other=0.0)
        acc = tl.dot((s * decay * dt[None, :]).to(x.dtype), x, acc)
    y_at = Y + ((cell * LEN + late[:, None]) * H + head) * P + p[None, :]
    tl.store(y_at, acc, mask=(late[:, None] < LEN) & (p[None, :] < P))


def _side(LEN):
    return max(16, min(64, triton.next_power_of_2(LEN)))


def forward(x, b, c, dt, da):
    # x (B, chunks, LEN, H, P); b, c (B, chunks, LEN, G, N); dt and da, log decays, (B, H, chunks, LEN) in fp32.
    x, b, c, dt, da = (t.contiguous() for t in (x, b, c, dt, da))
    B, chunks, LEN, H, P = x.shape
    G, N = b.shape[3:]
    cells, BLOCK_L = B * chunks, _side(LEN)
    tiles = triton.cdiv(LEN, BLOCK_L)
    sums = torch.empty_like(da)
    _decay_sums[(B * H * chunks,)](da, sums, LEN=LEN, BLOCK=triton.next_power_of_2(LEN), num_warps=1)
    scores = torch.zeros(B, chunks, G, LEN, LEN, device=x.device, dtype=torch.float32)
    _group_scores[(cells * G, tiles, tiles)](
        b, c, scores, G, LEN=LEN, N=N, BLOCK_L=BLOCK_L, BLOCK_N=max(16, triton.next_power_of_2(N)), num_warps=4
    )
    y = torch.empty_like(x)
    _chunk_scan_fwd[(cells, H, tiles)](
        x, dt, sums, scores, y, H, G, chunks, LEN=LEN, P=P,
        BLOCK_L=BLOCK_L, BLOCK_P=max(16, triton.next_power_of_2(P)), num_warps=4,
    )  # fmt: skip
    return y, (x, b, c, dt, sums, scores)


# --- backward ---
@triton.jit
def _dscores(
    DY, X, Dt, Sums, Scores, DScores, RowSums, H, G, chunks, dy_b, dy_c, dy_l, dy_h, dy_p,
    LEN: tl.constexpr, P: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) > tl.program_id(1):
        return
    owner = tl.program_id(0).to(tl.int64)
    cell = owner // G
    late = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    early = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    p = tl.arange(0, BLOCK_P)
    at = (owner * LEN + late[:, None]) * LEN + early[None, :]
    ok = (late[:, None] < LEN) & (early[None, :] < LEN)
    below = tl.load(Scores + at, mask=ok & (late[:, None] > early[None, :]), other=0.0)
    ds = tl.zeros((BLOCK_L, BLOCK_L), tl.float32)
    dy_rows = DY + cell // chunks * dy_b + cell % chunks * dy_c + late[:, None].to(tl.int64) * dy_l
    share = H // G
    for head in range(owner % G * share, (owner % G + 1) * share):
        row = ((cell // chunks * H + head) * chunks + cell % chunks) * LEN
        decay, dt = _pair_decay(Sums, Dt, row, late, early, LEN)
        dy_at = dy_rows + head * dy_h + p[None, :].to(tl.int64) * dy_p
        dy = tl.load(dy_at, mask=(late[:, None] < LEN) & (p[None, :] < P), other=0.0)
        x_at = X + ((cell * LEN + early[None, :]) * H + head) * P + p[:, None]
        xt = tl.load(x_at, mask=(early[None, :] < LEN) & (p[:, None] < P), other=0.0)
        pulled = tl.dot(dy, xt) * decay * dt[None, :]
        ds += pulled
        # One partial row for each tile of early steps.
        part = tl.program_id(2).to(tl.int64) * (tl.num_programs(0) // G * H * LEN) + row
        tl.store(RowSums + part + late, tl.sum(pulled * below, 1), mask=late < LEN)
    tl.store(DScores + at, ds, mask=ok)


@triton.jit
def _chunk_scan_dx(
    DY, X, Dt, Sums, Scores, DX, DDt, ColumnSums, H, G, chunks, dy_b, dy_c, dy_l, dy_h, dy_p,
    LEN: tl.constexpr, P: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    cell = tl.program_id(0).to(tl.int64)
    first = tl.program_id(2) * BLOCK_L
    early = first + tl.arange(0, BLOCK_L)
    p = tl.arange(0, BLOCK_P)
    row = ((cell // chunks * H + head) * chunks + cell % chunks) * LEN
    scores = Scores + (cell * G + head // (H // G)) * LEN * LEN
    x_at = ((cell * LEN + early[:, None]) * H + head) * P + p[None, :]
    x_ok = (early[:, None] < LEN) & (p[None, :] < P)
    xt = tl.trans(tl.load(X + x_at, mask=x_ok, other=0.0))
    dy_head = DY + cell // chunks * dy_b + cell % chunks * dy_c + head.to(tl.int64) * dy_h
    dx = tl.zeros((BLOCK_L, BLOCK_P), tl.float32)
    on = tl.zeros((BLOCK_L,), tl.float32)
    off = tl.zeros((BLOCK_L,), tl.float32)
    for start in range(first, LEN, BLOCK_L):
        late = start + tl.arange(0, BLOCK_L)
        decay, _ = _pair_decay(Sums, Dt, row, late, early, LEN)
        ok = (late[:, None] < LEN) & (early[None, :] < LEN)
        weight = tl.load(scores + late[:, None] * LEN + early[None, :], mask=ok, other=0.0) * decay
        dy_at = dy_head + late[:, None].to(tl.int64) * dy_l + p[None, :].to(tl.int64) * dy_p
        dy = tl.load(dy_at, mask=(late[:, None] < LEN) & (p[None, :] < P), other=0.0)
        dx = tl.dot(tl.trans(weight).to(dy.dtype), dy, dx)
        pulled = tl.dot(dy, xt) * weight
        diagonal = late[:, None] == early[None, :]
        on += tl.sum(tl.where(diagonal, pulled, 0.0), 0)
        off += tl.sum(tl.where(diagonal, 0.0, pulled), 0)
    dt = tl.load(Dt + row + early, mask=early < LEN, other=0.0)
    tl.store(DX + x_at, dx * dt[:, None], mask=x_ok)
    tl.store(DDt + row + early, on + off, mask=early < LEN)
    tl.store(ColumnSums + row + early, off * dt, mask=early < LEN)


@triton.jit
def _group_inputs(
    DScores, Bs, Cs, DB, DC, G, LEN: tl.constexpr, N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr
):
    owner = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_L
    mine = first + tl.arange(0, BLOCK_L)
    n = tl.arange(0, BLOCK_N)
    base = (owner // G * LEN * G + owner % G) * N
    scores = DScores + owner * LEN * LEN
    out = base + mine[:, None] * (G * N) + n[None, :]
    out_ok = (mine[:, None] < LEN) & (n[None, :] < N)
    dc = tl.zeros((BLOCK_L, BLOCK_N), tl.float32)
    for start in range(0, first + BLOCK_L, BLOCK_L):
        other = start + tl.arange(0, BLOCK_L)
        ok = (mine[:, None] < LEN) & (other[None, :] < LEN)
        ds = tl.load(scores + mine[:, None] * LEN + other[None, :], mask=ok, other=0.0)
        b_at = Bs + base + other[:, None] * (G * N) + n[None, :]
        dc = tl.dot(ds, tl.load(b_at, mask=(other[:, None] < LEN) & (n[None, :] < N), other=0.0), dc)
    tl.store(DC + out, dc, mask=out_ok)
    db = tl.zeros((BLOCK_L, BLOCK_N), tl.float32)
    for start in range(first, LEN, BLOCK_L):
        other = start + tl.arange(0, BLOCK_L)
        ok = (mine[:, None] < LEN) & (other[None, :] < LEN)
        ds = tl.load(scores + other[None, :] * LEN + mine[:, None], mask=ok, other=0.0)
        c_at = Cs + base + other[:, None] * (G * N) + n[None, :]
        db = tl.dot(ds, tl.load(c_at, mask=(other[:, None] < LEN) & (n[None, :] < N), other=0.0), db)
    tl.store(DB + out, db, mask=out_ok)


@triton.jit
def _decay_logs_bwd(
    RowSums, ColumnSums, DDecayLogs, part_size, LEN: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * LEN
    step = tl.arange(0, BLOCK)
    dsum = -tl.load(ColumnSums + row + step, mask=step < LEN, other=0.0)
    for tile in range((LEN + BLOCK_L - 1) // BLOCK_L):
        at = RowSums + tile * tl.cast(part_size, tl.int64) + row + step
        dsum += tl.load(at, mask=(step >= tile * BLOCK_L) & (step < LEN), other=0.0)
    tl.store(DDecayLogs + row + step, tl.cumsum(dsum, 0, reverse=True), mask=step < LEN)


def backward(saved, grad_y, needs=None):
    x, b, c, dt, sums, scores = saved
    B, chunks, LEN, H, P = x.shape
    G, N = b.shape[3:]
    cells, BLOCK_L = B * chunks, _side(LEN)
    tiles = triton.cdiv(LEN, BLOCK_L)
    BLOCK_P, BLOCK_N = (max(16, triton.next_power_of_2(size)) for size in (P, N))
    dx, db, dc, ddt, dda = (torch.empty_like(t) for t in (x, b, c, dt, sums))
    dscores = torch.empty_like(scores, dtype=x.dtype)
    row_sums = torch.empty(tiles, *dt.shape, device=x.device, dtype=torch.float32)
    column_sums = torch.empty_like(dt)
    strides = grad_y.stride()
    _dscores[(cells * G, tiles, tiles)](
        grad_y, x, dt, sums, scores, dscores, row_sums, H, G, chunks, *strides,
        LEN=LEN, P=P, BLOCK_L=BLOCK_L, BLOCK_P=BLOCK_P, num_warps=4,
    )  # fmt: skip
    _chunk_scan_dx[(cells, H, tiles)](
        grad_y, x, dt, sums, scores, dx, ddt, column_sums, H, G, chunks, *strides,
        LEN=LEN, P=P, BLOCK_L=BLOCK_L, BLOCK_P=BLOCK_P, num_warps=4,
    )  # fmt: skip
    _group_inputs[(cells * G, tiles)](
        dscores, b, c, db, dc, G, LEN=LEN, N=N, BLOCK_L=BLOCK_L, BLOCK_N=BLOCK_N, num_warps=4
    )
    _decay_logs_bwd[(B * H * chunks,)](
        row_sums, column_sums, dda, dt.numel(), LEN=LEN, BLOCK_L=BLOCK_L, BLOCK=triton.next_power_of_2(LEN), num_warps=1
    )
    return dx, db, dc, ddt, dda


# --- check ---
SWEEP = (
    {"B": 1, "chunks": 2, "LEN": 32, "G": 1, "SHARE": 2, "P": 16, "N": 16},
    {"B": 1, "chunks": 1, "LEN": 83, "G": 2, "SHARE": 1, "P": 12, "N": 18},
    {"B": 2, "chunks": 1, "LEN": 24, "G": 1, "SHARE": 3, "P": 16, "N": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "chunks": 16, "LEN": 256, "G": 1, "SHARE": 32, "P": 64, "N": 128, "dtype": "bfloat16"},)


def make_args(B, chunks, LEN, G, SHARE, P, N, dtype="float32", device="cpu", seed=0):
    # SHARE heads for each of G groups.
    g = torch.Generator().manual_seed(seed)
    H = G * SHARE
    x = torch.randn(B, chunks, LEN, H, P, generator=g)
    b, c = (torch.randn(B, chunks, LEN, G, N, generator=g) * N**-0.25 for _ in range(2))
    dt = torch.nn.functional.softplus(torch.randn(B, H, chunks, LEN, generator=g) - 2.0)
    x, b, c = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, b, c))
    return x, b, c, dt.to(device), (-dt).to(device)


def reference(x, b, c, dt, da):
    share = x.shape[3] // b.shape[3]
    sums = da.cumsum(-1)
    lag = sums[..., :, None] - sums[..., None, :]
    seen = torch.ones(lag.shape[-2:], device=x.device, dtype=torch.bool).tril()
    decay = torch.exp(torch.where(seen, lag, -float("inf"))) * dt[..., None, :]
    scores = torch.einsum("bclgn,bcsgn->bgcls", c, b).repeat_interleave(share, 1)
    return torch.einsum("bhcls,bcshp->bclhp", (scores * decay).to(x.dtype), x)
