"""Position and age embeddings added to jagged sequences: one table by owners, one by runs of equal ages.

A position of the first table owns its gradient and walks the sequences, whose offsets tell its token in each. Ages fall
into logarithmic buckets, and tokens of a sequence lie in order of time: a program takes a tile of neighbouring tokens,
which nearly always share a bucket, sums it and leaves one atomic. Where the bucket changes within the tile, it walks
the tokens and leaves one atomic for each run. dx is the cotangent itself.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "timestamp_position_embed",
    "family": "rope_position",
    "op": "position_embedding",
    "schema": 1,
    "techniques": ("varlen", "broadcast-adjoint", "broadcast-reduction", "atomics", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "positions", "times"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _age_bucket(age, scale, last):
    return tl.minimum(tl.floor(tl.log2(1.0 + age.to(tl.float32)) * scale).to(tl.int32), last)


@triton.jit
def _embed_fwd(
    X, Offsets, Ages, Positions, Times, Y, sequences, D, scale, last_position, last_time, x_t, x_d,
    BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    i = tl.arange(0, BLOCK_B)
    # The start of the token's sequence is the largest offset that does not exceed it.
    offsets = tl.load(Offsets + i, mask=i < sequences, other=0)
    position = tl.minimum(token - tl.max(tl.where(offsets <= token, offsets, 0), 0), last_position)
    bucket = _age_bucket(tl.load(Ages + token), scale, last_time)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    y = tl.load(X + token.to(tl.int64) * x_t + d * x_d, mask=d < D, other=0.0).to(tl.float32)
    y += tl.load(Positions + position.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    y += tl.load(Times + bucket.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(Y + token.to(tl.int64) * D + d, y, mask=d < D)


def _block(D):
    return max(16, min(512, triton.next_power_of_2(D)))


def forward(x, offsets, ages, positions, times, scale):
    positions, times = positions.contiguous(), times.contiguous()
    T, D = x.shape
    y = torch.empty(T, D, device=x.device, dtype=x.dtype)
    sequences = offsets.numel() - 1
    BLOCK_D = _block(D)
    _embed_fwd[(T, triton.cdiv(D, BLOCK_D))](
        x, offsets, ages, positions, times, y, sequences, D, scale, positions.shape[0] - 1, times.shape[0] - 1,
        *x.stride(), BLOCK_B=triton.next_power_of_2(sequences), BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return y, (offsets, ages, scale, positions.shape[0], times.shape[0], positions.dtype, times.dtype)


# --- backward ---
@triton.jit
def _position_owner(DY, Offsets, DPositions, sequences, D, last, dy_t, dy_d, BLOCK_D: tl.constexpr):
    position = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    column = DY + d.to(tl.int64) * dy_d
    total = tl.zeros((BLOCK_D,), tl.float32)
    for b in range(sequences):
        start = tl.load(Offsets + b)
        end = tl.load(Offsets + b + 1)
        # One token, or none; the last position also has all tokens that lie beyond it.
        stop = tl.where(position == last, end, tl.minimum(start + position + 1, end))
        for token in range(start + position, stop):
            total += tl.load(column + token.to(tl.int64) * dy_t, mask=d < D, other=0.0).to(tl.float32)
    tl.store(DPositions + position.to(tl.int64) * D + d, total, mask=d < D)


@triton.jit
def _age_runs(DY, Ages, DTimes, T, D, scale, last, dy_t, dy_d, RUN: tl.constexpr, BLOCK_D: tl.constexpr):
    first = tl.program_id(0) * RUN
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    column = DY + d.to(tl.int64) * dy_d
    total = tl.zeros((BLOCK_D,), tl.float32)
    current = _age_bucket(tl.load(Ages + first), scale, last)
    t = first + tl.arange(0, RUN)
    buckets = _age_bucket(tl.load(Ages + t, mask=t < T, other=0), scale, last)
    if tl.sum(((buckets != current) & (t < T)).to(tl.int32), 0) == 0:
        tile = column[None, :] + t.to(tl.int64)[:, None] * dy_t
        total += tl.sum(tl.load(tile, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32), 0)
    else:
        for token in range(first, tl.minimum(first + RUN, T)):
            bucket = _age_bucket(tl.load(Ages + token), scale, last)
            if bucket != current:
                tl.atomic_add(DTimes + current.to(tl.int64) * D + d, total, mask=d < D, sem="relaxed")
                total = tl.zeros((BLOCK_D,), tl.float32)
            current = bucket
            total += tl.load(column + token.to(tl.int64) * dy_t, mask=d < D, other=0.0).to(tl.float32)
    tl.atomic_add(DTimes + current.to(tl.int64) * D + d, total, mask=d < D, sem="relaxed")


def backward(saved, grad_y, needs=None):
    offsets, ages, scale, P, A, position_dtype, time_dtype = saved
    _, need_positions, need_times = needs or (True, True, True)
    T, D = grad_y.shape
    dpositions = dtimes = None
    BLOCK_D = min(512, _block(D))
    columns = triton.cdiv(D, BLOCK_D)
    if need_positions:
        dpositions = torch.empty(P, D, device=grad_y.device, dtype=position_dtype)
        _position_owner[(P, columns)](
            grad_y, offsets, dpositions, offsets.numel() - 1, D, P - 1, *grad_y.stride(), BLOCK_D=BLOCK_D, num_warps=1
        )
    if need_times:
        sums = torch.zeros(A, D, device=grad_y.device, dtype=torch.float32)
        _age_runs[(triton.cdiv(T, 32), columns)](
            grad_y, ages, sums, T, D, scale, A - 1, *grad_y.stride(), RUN=32, BLOCK_D=BLOCK_D, num_warps=2
        )
        dtimes = sums.to(time_dtype)
    return grad_y, dpositions, dtimes


# --- check ---
SWEEP = (
    {"lengths": (20, 0, 33, 12), "P": 32, "A": 12, "D": 32, "dtype": "float16"},
    {"lengths": (75, 3, 19), "P": 64, "A": 9, "D": 45},
    {"lengths": (9, 14), "P": 16, "A": 16, "D": 64, "dtype": "bfloat16"},
    {"lengths": (20, 0, 14), "P": 40, "A": 12, "D": 45},  # the last run has one token of another age
    {"lengths": (20, 0, 14), "P": 40, "A": 12, "D": 45, "pace": 2},  # every age up to some: each end of a bucket
)
BENCH = (
    {
        "lengths": (8192, 2000, 511, 4096, 1, 7000, 3000, 8192, 6000, 8192, 900, 5000, 8192, 77, 4000, 1500),
        "P": 8192,
        "A": 64,
        "D": 512,
        "dtype": "bfloat16",
    },
)


def make_args(lengths, P, A, D, pace=400, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    T = int(offsets[-1])
    x, positions, times = (torch.randn(rows, D, generator=g) for rows in (T, P, A))
    # Seconds before the newest event: the sequences, one after another, from old to new.
    steps = torch.randint(0, pace, (T,), generator=g, dtype=torch.int32)
    ages = (steps.sum() - steps.cumsum(0)).to(torch.int32)
    # None lies at the border of two buckets, where rounding would choose between them.
    place = (1.0 + ages.double()).log2() * 0.83
    ages = torch.where((ages > 1000) & ((place - place.round()).abs() < 1e-4), ages - ages // 1000, ages)
    dt = getattr(torch, dtype)
    return x.to(device, dt), offsets.to(device), ages.to(device), positions.to(device, dt), times.to(device, dt), 0.83


def reference(x, offsets, ages, positions, times, scale):
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(offsets, token.to(offsets.dtype), right=True) - 1
    position = (token - offsets[sequence]).clamp(max=positions.shape[0] - 1)
    bucket = ((1.0 + ages.float()).log2() * scale).floor().long().clamp(max=times.shape[0] - 1)
    return (x.float() + positions[position].float() + times[bucket].float()).to(x.dtype)
