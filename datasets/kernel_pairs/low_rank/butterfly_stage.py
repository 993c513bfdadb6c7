"""Product of butterfly factors, three stages per launch: launches leave checkpoints, the stages between are replayed.

Factor i mixes the pairs of columns that differ in bit i, each by a 2 x 2 matrix of its own:
    (a', b') = (w0 a + w1 b, w2 a + w3 b),    da = w0 da' + w2 db',    dw0 = sum over rows of a da', and so on.
Three neighbouring bits touch eight columns at a stride, hence a launch reads x once for three stages: its program owns
eight columns of a few such sets and some rows, and leaves its result, the next launch's checkpoint, in the dtype of x.
The backward walks the launches from the last. It loads a checkpoint, replays the three stages with all inputs kept in
registers, and takes the cotangent back through them. The eight columns' weights stay with their program, which sums
their gradients over its rows and leaves one partial.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "butterfly_stage",
    "family": "low_rank",
    "op": "butterfly_linear",
    "schema": 1,
    "techniques": ("checkpointed-states", "recompute", "column-owner", "two-stage-partials", "strided-cotangent"),
    "saves": ("checkpoints: fp32 or bf16 or fp16 (launches - 1, M, N)",),
    "grads": ("x", "factors"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pairs(x, ROWS: tl.constexpr, HALF: tl.constexpr, SETS: tl.constexpr):
    """The two halves of each pair, of columns (ROWS, 2 HALF, SETS) whose lowest bit is the stage's."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, HALF, 2, SETS)), (0, 1, 3, 2)))


@triton.jit
def _rotated(a, b, ROWS: tl.constexpr, HALF: tl.constexpr, SETS: tl.constexpr):
    # The stage's bit becomes the highest: the next stage's is the lowest now, and the last stage restores the order.
    return tl.reshape(tl.permute(tl.join(a, b), (0, 3, 1, 2)), (ROWS, 2 * HALF, SETS))


@triton.jit
def _factor(Factors, stage, sets, sets_ok, STAGE: tl.constexpr, STAGES: tl.constexpr, LOW: tl.constexpr, PAIRS):
    """Weights w0 .. w3 of the sets' pairs at bit STAGE of STAGES, as tiles (1, HALF, SETS), and where they lie."""
    HALF: tl.constexpr = 2 ** (STAGES - 1)
    REST: tl.constexpr = 2 ** (STAGES - 1 - STAGE)
    r = tl.arange(0, HALF)
    # The pair's number without the stage's bit: of its rotated bits the upper ones are those below that bit.
    pair = r // REST + (r % REST) * 2**STAGE
    index = (sets // LOW) * (HALF * LOW) + sets % LOW
    at = stage * 4 * PAIRS + pair[:, None] * LOW + index[None, :]
    ok = sets_ok[None, :] & (pair[:, None] >= 0)
    w0 = tl.load(Factors + at, mask=ok, other=0.0).to(tl.float32)
    w1 = tl.load(Factors + PAIRS + at, mask=ok, other=0.0).to(tl.float32)
    w2 = tl.load(Factors + 2 * PAIRS + at, mask=ok, other=0.0).to(tl.float32)
    w3 = tl.load(Factors + 3 * PAIRS + at, mask=ok, other=0.0).to(tl.float32)
    return w0[None, :, :], w1[None, :, :], w2[None, :, :], w3[None, :, :], at


@triton.jit
def _columns(sets, STAGES: tl.constexpr, LOW: tl.constexpr):
    """Columns (2**STAGES, SETS) of the sets: LOW columns lie between neighbours of one set."""
    point = tl.arange(0, 2**STAGES)
    return (sets // LOW * (2**STAGES * LOW) + sets % LOW)[None, :] + point[:, None] * LOW


@triton.jit
def _butterfly_fwd(
    X, Factors, Y, M, N, first_stage, STAGES: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, SETS: tl.constexpr
):
    HALF: tl.constexpr = 2 ** (STAGES - 1)
    sets = tl.program_id(1) * SETS + tl.arange(0, SETS)
    sets_ok = sets < N // (2 * HALF)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = m[:, None, None] * N + _columns(sets, STAGES, LOW)[None, :, :]
    ok = (m[:, None, None] < M) & sets_ok[None, None, :]
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    for stage in tl.static_range(STAGES):
        w0, w1, w2, w3, _ = _factor(Factors, first_stage + stage, sets, sets_ok, stage, STAGES, LOW, N // 2)
        a, b = _pairs(x, ROWS, HALF, SETS)
        x = _rotated(w0 * a + w1 * b, w2 * a + w3 * b, ROWS, HALF, SETS)
    tl.store(Y + at, x, mask=ok)


def _launches(log_n):
    """(first stage, number of stages) of each launch: threes, and what is left."""
    return [(first, min(3, log_n - first)) for first in range(0, log_n, 3)]


def _tile(N, stages):
    """Rows and sets of a tile of 1024 numbers. Sets are as many as make 64 bytes or more of neighbouring columns."""
    sets = min(32, N >> stages)
    return {"ROWS": max(1, min(16, 1024 // (sets << stages))), "SETS": sets}


def forward(x, factors):
    # x (M, N), N a power of two; factors (log2 N, 4, N / 2): w0 .. w3 of the pairs, counted without the stage's bit.
    x, factors = x.contiguous(), factors.contiguous()
    M, N = x.shape
    launches = _launches(factors.shape[0])
    checkpoints = torch.empty(len(launches) - 1, M, N, device=x.device, dtype=x.dtype)
    y = torch.empty_like(x)
    states = [x, *checkpoints, y]
    for number, (first, stages) in enumerate(launches):
        tile = _tile(N, stages)
        _butterfly_fwd[(triton.cdiv(M, tile["ROWS"]), triton.cdiv(N >> stages, tile["SETS"]))](
            states[number], factors, states[number + 1], M, N, first,
            STAGES=stages, LOW=1 << first, **tile, num_warps=4,
        )  # fmt: skip
    return y, (x, factors, checkpoints)


# --- backward ---
@triton.jit
def _pulled(g, w0, w1, w2, w3, ROWS: tl.constexpr, HALF: tl.constexpr, SETS: tl.constexpr):
    """The rotated cotangent back through one stage: its two halves, and the tile that enters the stage before."""
    ga, gb = tl.split(tl.permute(tl.reshape(g, (ROWS, 2, HALF, SETS)), (0, 2, 3, 1)))
    before = tl.permute(tl.join(w0 * ga + w2 * gb, w1 * ga + w3 * gb), (0, 1, 3, 2))
    return ga, gb, tl.reshape(before, (ROWS, 2 * HALF, SETS))


@triton.jit
def _weight_sums(a, b, ga, gb):
    """Sums over the tile's rows of the four products, as (HALF, SETS, 2, 2)."""
    to_a = tl.join(tl.sum(ga * a, 0), tl.sum(gb * a, 0))
    to_b = tl.join(tl.sum(ga * b, 0), tl.sum(gb * b, 0))
    return tl.join(to_a, to_b)


@triton.jit
def _store_weights(Parts, dw, at, ok, PAIRS):
    to_a, to_b = tl.split(dw)
    d0, d2 = tl.split(to_a)
    d1, d3 = tl.split(to_b)
    tl.store(Parts + at, d0, mask=ok)
    tl.store(Parts + PAIRS + at, d1, mask=ok)
    tl.store(Parts + 2 * PAIRS + at, d2, mask=ok)
    tl.store(Parts + 3 * PAIRS + at, d3, mask=ok)


@triton.jit
def _butterfly_bwd(
    DY, X, Factors, DX, Parts, M, N, first_stage, dy_m, dy_n,
    STAGES: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, SETS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = 2 ** (STAGES - 1)
    PAIRS = N // 2
    sets = tl.program_id(1) * SETS + tl.arange(0, SETS)
    sets_ok = sets < N // (2 * HALF)
    columns = _columns(sets, STAGES, LOW)[None, :, :]
    # Weights and their gradients' sums of all stages stay in registers while the rows go by.
    p0, p1, p2, p3, p_at = _factor(Factors, first_stage, sets, sets_ok, 0, STAGES, LOW, PAIRS)
    dp = tl.zeros((HALF, SETS, 2, 2), tl.float32)
    if STAGES > 1:
        q0, q1, q2, q3, q_at = _factor(Factors, first_stage + 1, sets, sets_ok, 1, STAGES, LOW, PAIRS)
        dq = tl.zeros((HALF, SETS, 2, 2), tl.float32)
    if STAGES > 2:
        r0, r1, r2, r3, r_at = _factor(Factors, first_stage + 2, sets, sets_ok, 2, STAGES, LOW, PAIRS)
        dr = tl.zeros((HALF, SETS, 2, 2), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * ROWS, M, tl.num_programs(0) * ROWS):
        m = start + tl.arange(0, ROWS)[:, None, None]
        ok = (m < M) & sets_ok[None, None, :]
        x = tl.load(X + m * N + columns, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(DY + m * dy_m + columns.to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        a0, b0 = _pairs(x, ROWS, HALF, SETS)
        if STAGES > 1:
            x = _rotated(p0 * a0 + p1 * b0, p2 * a0 + p3 * b0, ROWS, HALF, SETS)
            a1, b1 = _pairs(x, ROWS, HALF, SETS)
            if STAGES > 2:
                x = _rotated(q0 * a1 + q1 * b1, q2 * a1 + q3 * b1, ROWS, HALF, SETS)
                a2, b2 = _pairs(x, ROWS, HALF, SETS)
                ga, gb, g = _pulled(g, r0, r1, r2, r3, ROWS, HALF, SETS)
                dr += _weight_sums(a2, b2, ga, gb)
            ga, gb, g = _pulled(g, q0, q1, q2, q3, ROWS, HALF, SETS)
            dq += _weight_sums(a1, b1, ga, gb)
        ga, gb, g = _pulled(g, p0, p1, p2, p3, ROWS, HALF, SETS)
        dp += _weight_sums(a0, b0, ga, gb)
        tl.store(DX + m * N + columns, g, mask=ok)
    Parts += tl.program_id(0).to(tl.int64) * (STAGES * 4) * PAIRS - first_stage * 4 * PAIRS
    pairs_ok = sets_ok[None, :] & (tl.arange(0, HALF)[:, None] >= 0)
    _store_weights(Parts, dp, p_at, pairs_ok, PAIRS)
    if STAGES > 1:
        _store_weights(Parts, dq, q_at, pairs_ok, PAIRS)
    if STAGES > 2:
        _store_weights(Parts, dr, r_at, pairs_ok, PAIRS)


def backward(saved, grad_y, needs=None):
    x, factors, checkpoints = saved
    M, N = x.shape
    grad, dfactors = grad_y, torch.empty_like(factors)
    launches = _launches(factors.shape[0])
    for (first, stages), state in zip(reversed(launches), reversed((x, *checkpoints)), strict=True):
        tile = _tile(N, stages)
        owners = triton.cdiv(N >> stages, tile["SETS"])
        # About four programs for each of 132 processors, with rows enough that partials are small beside them.
        splits = max(1, min(528 // owners, triton.cdiv(M, 16 * tile["ROWS"])))
        dx = torch.empty_like(x)
        parts = torch.empty(splits, stages, 4, N // 2, device=x.device, dtype=torch.float32)
        _butterfly_bwd[(splits, owners)](
            grad, state, factors, dx, parts, M, N, first, grad.stride(0), grad.stride(1),
            STAGES=stages, LOW=1 << first, **tile, num_warps=4,
        )  # fmt: skip
        dfactors[first : first + stages] = parts.sum(0)
        grad = dx
    return grad, dfactors


# --- check ---
SWEEP = (
    {"M": 70, "LOG_N": 5},
    {"M": 37, "LOG_N": 7, "dtype": "float16"},
    {"M": 19, "LOG_N": 6, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "LOG_N": 12, "dtype": "bfloat16"},)


def make_args(M, LOG_N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, 2**LOG_N, generator=g)
    # Variance is kept on average.
    factors = torch.randn(LOG_N, 4, 2 ** (LOG_N - 1), generator=g) * 0.5**0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, factors))


def reference(x, factors):
    M, N = x.shape
    state = x.float()
    for stage, weights in enumerate(factors.float()):
        low = 1 << stage
        w0, w1, w2, w3 = weights.view(4, N // (2 * low), low)
        a, b = state.view(M, -1, 2, low).unbind(2)
        state = torch.stack((w0 * a + w1 * b, w2 * a + w3 * b), 2).view(M, N)
        if stage % 3 == 2:
            # Where a launch ends.
            state = state.to(x.dtype).float()
    return state.to(x.dtype)
