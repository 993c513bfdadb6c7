"""Scores plus a learned bias for each bucket of distance: the table's gradient is a histogram with few, wide bins.

Buckets are exact up to a distance and logarithmic beyond. Along a tile of scores the distance spans little, so that a
tile meets one or two buckets, or a few dozen near the diagonal: a program sums only over the range that its tile can
meet, adds the sums up in a register per bucket over all of its tiles, and ends with one atomic for each bucket it met.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "relative_bias_t5",
    "family": "rope_position",
    "op": "relative_position_bias",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "broadcast-reduction", "atomics", "strided-cotangent"),
    "saves": (),
    "grads": ("scores", "table"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bucket(distance, exact, per_octave, last):
    """Bucket of a distance that is not negative: itself up to `exact`, then `per_octave` for each doubling."""
    far = tl.maximum(distance, 1).to(tl.float32) / exact
    slot = exact + tl.floor(tl.log2(far) * per_octave).to(tl.int32)
    return tl.where(distance < exact, distance, tl.minimum(slot, last))


@triton.jit
def _t5_fwd(X, Table, Y, H, S, T, exact, per_octave, last, x_b, x_h, x_s, x_t, ROWS: tl.constexpr, COLS: tl.constexpr):
    matrix = tl.program_id(1)
    b, h = (matrix // H).to(tl.int64), matrix % H
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    for start in range(0, T, COLS):
        j = (start + tl.arange(0, COLS))[None, :]
        mask = (i < S) & (j < T)
        bucket = _bucket(tl.abs(i - j), exact, per_octave, last)
        source = X + b * x_b + h.to(tl.int64) * x_h + i.to(tl.int64) * x_s + j.to(tl.int64) * x_t
        x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(Table + bucket * H + h, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + (matrix.to(tl.int64) * S + i) * T + j, x + bias, mask=mask)


def _tile(S, T):
    return max(1, min(32, triton.next_power_of_2(S))), max(16, min(128, triton.next_power_of_2(T)))


def forward(scores, table, exact, per_octave):
    table = table.contiguous()
    B, H, S, T = scores.shape
    last = table.shape[0] - 1
    if exact > last:
        raise ValueError(f"{exact} exact distances leave none of {last + 1} buckets for the others")
    y = torch.empty(B, H, S, T, device=scores.device, dtype=scores.dtype)
    ROWS, COLS = _tile(S, T)
    _t5_fwd[(triton.cdiv(S, ROWS), B * H)](
        scores, table, y, H, S, T, exact, per_octave, last, *scores.stride(), ROWS=ROWS, COLS=COLS, num_warps=8
    )
    return y, (exact, per_octave, last, table.dtype)


# --- backward ---
@triton.jit
def _t5_table(
    DY, DTable, H, S, T, exact, per_octave, last, dy_b, dy_h, dy_s, dy_t,
    ROWS: tl.constexpr, COLS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1)
    b, h = (matrix // H).to(tl.int64), matrix % H
    first = tl.program_id(0) * ROWS
    i = (first + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, BUCKETS)
    sums = tl.zeros((BUCKETS,), tl.float32)
    met = tl.zeros((BUCKETS,), tl.int32)
    for start in range(0, T, COLS):
        j = (start + tl.arange(0, COLS))[None, :]
        source = DY + b * dy_b + h.to(tl.int64) * dy_h + i.to(tl.int64) * dy_s + j.to(tl.int64) * dy_t
        dy = tl.load(source, mask=(i < S) & (j < T), other=0.0).to(tl.float32)
        bucket = _bucket(tl.abs(i - j), exact, per_octave, last)
        # Signed distances of the tile run from `least` to `most`; zero lies within where it meets the diagonal.
        least = first - (start + COLS - 1)
        most = first + ROWS - 1 - start
        near = tl.maximum(tl.maximum(least, -most), 0)
        low = _bucket(near, exact, per_octave, last)
        high = _bucket(tl.maximum(tl.abs(least), tl.abs(most)), exact, per_octave, last)
        for k in range(low, high + 1):
            share = tl.sum(tl.sum(tl.where(bucket == k, dy, 0.0), 1), 0)
            sums += tl.where(lane == k, share, 0.0)
        met = tl.where((lane >= low) & (lane <= high), 1, met)
    tl.atomic_add(DTable + lane * H + h, sums, mask=(met != 0) & (lane <= last), sem="relaxed")


def backward(saved, grad_y, needs=None):
    exact, per_octave, last, dtype = saved
    _, need_table = needs or (True, True)
    if not need_table:
        return grad_y, None
    B, H, S, T = grad_y.shape
    dtable = torch.zeros(last + 1, H, device=grad_y.device, dtype=torch.float32)
    ROWS, COLS = _tile(S, T)
    _t5_table[(triton.cdiv(S, ROWS), B * H)](
        grad_y, dtable, H, S, T, exact, per_octave, last, *grad_y.stride(),
        ROWS=ROWS, COLS=COLS, BUCKETS=triton.next_power_of_2(last + 1), num_warps=8,
    )  # fmt: skip
    return grad_y, dtable.to(dtype)


# --- check ---
SWEEP = (
    {"B": 2, "H": 2, "S": 48, "T": 64, "exact": 8, "buckets": 16, "dtype": "float16"},
    {"B": 1, "H": 3, "S": 37, "T": 151, "exact": 6, "buckets": 13},
    {"B": 1, "H": 2, "S": 20, "T": 40, "exact": 4, "buckets": 12, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "S": 2048, "T": 2048, "exact": 16, "buckets": 32, "dtype": "bfloat16"},)


def make_args(B, H, S, T, exact, buckets, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    buckets = max(buckets, exact + 1)
    scores, table = torch.randn(B, H, S, T, generator=g), torch.randn(buckets, H, generator=g)
    # Off the powers of two, at which a logarithm may fall on either side of a border. The last bucket has no end.
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (scores, table)), exact, 2.9


def reference(scores, table, exact, per_octave):
    S, T = scores.shape[2:]
    distance = (torch.arange(S, device=table.device)[:, None] - torch.arange(T, device=table.device)).abs()
    far = exact + ((distance.clamp(min=1) / exact).log2() * per_octave).floor().long()
    bucket = torch.where(distance < exact, distance, far.clamp(max=table.shape[0] - 1))
    return (scores.float() + table.float()[bucket].permute(2, 0, 1)).to(scores.dtype)
