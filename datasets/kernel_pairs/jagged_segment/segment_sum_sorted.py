"""Sums of rows with sorted segment numbers: owners find their stretch by bisection, the backward reads dy once per run.

In sorted order most tiles lie inside one segment. Such a tile loads a single row of the cotangent and spreads it over
all of its rows; only tiles across a border gather row by row.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "segment_sum_sorted",
    "family": "jagged_segment",
    "op": "segment_sum",
    "schema": 1,
    "techniques": ("sorted-segments", "broadcast-adjoint", "gather-form", "strided-cotangent"),
    "saves": (),
    "grads": ("src",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _first_at_least(Ids, number, T, steps):
    low = T * 0
    high = T
    for _ in range(steps):
        middle = (low + high) // 2
        smaller = tl.load(Ids + middle, mask=low < high, other=0) < number
        low = tl.where((low < high) & smaller, middle + 1, low)
        high = tl.where((low < high) & (smaller == 0), middle, high)
    return low


@triton.jit
def _segment_sums(Src, Ids, Y, T, D, steps, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    segment = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = _first_at_least(Ids, segment, T, steps)
    end = _first_at_least(Ids, segment + 1, T, steps)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        ok = (t[:, None] < end) & (d[None, :] < D)
        total += tl.load(Src + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + segment.to(tl.int64) * D + d, tl.sum(total, 0), mask=d < D)


def forward(src, ids, segments):
    """src (T, D), ids (T) rising from 0 to at most segments - 1; segments without rows give zero."""
    src, ids = src.contiguous(), ids.contiguous()
    T, D = src.shape
    y = torch.empty(segments, D, device=src.device, dtype=src.dtype)
    BLOCK_D = min(128, triton.next_power_of_2(D))
    _segment_sums[(segments, triton.cdiv(D, BLOCK_D))](
        src, ids, y, T, D, T.bit_length(), BLOCK_T=2048 // BLOCK_D, BLOCK_D=BLOCK_D, num_warps=4
    )
    return y, (ids,)


# --- backward ---
@triton.jit
def _segment_bwd(DY, Ids, DSrc, T, D, dy_s, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    first = tl.program_id(0) * BLOCK_T
    t = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = (t[:, None] < T) & (d[None, :] < D)
    out = DSrc + t[:, None] * D + d[None, :]
    columns = DY + d.to(tl.int64) * dy_d
    front = tl.load(Ids + first).to(tl.int64)
    back = tl.load(Ids + tl.minimum(first + BLOCK_T, T) - 1).to(tl.int64)
    if front == back:
        row = tl.load(columns + front * dy_s, mask=d < D, other=0.0)
        tl.store(out, tl.broadcast_to(row[None, :], (BLOCK_T, BLOCK_D)), mask=ok)
    else:
        ids = tl.load(Ids + t, mask=t < T, other=0).to(tl.int64)
        tl.store(out, tl.load(columns[None, :] + ids[:, None] * dy_s, mask=ok, other=0.0), mask=ok)


def backward(saved, grad_y, needs=None):
    (ids,) = saved
    T, D = ids.numel(), grad_y.shape[1]
    dsrc = torch.empty(T, D, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_T = 4096 // BLOCK_D
    _segment_bwd[(triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D))](
        grad_y, ids, dsrc, T, D, *grad_y.stride(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dsrc


# --- check ---
SWEEP = (
    {"T": 256, "D": 64, "segments": 3},
    {"T": 403, "D": 21, "segments": 7},
    {"T": 60, "D": 300, "segments": 4, "dtype": "bfloat16"},
)
BENCH = ({"T": 262144, "D": 256, "segments": 4096, "dtype": "bfloat16"},)


def make_args(T, D, segments, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    src = torch.randn(T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The last segment stays empty.
    ids = torch.randint(0, max(1, segments - 1), (T,), generator=g).sort().values
    return src, ids.to(device), segments


def reference(src, ids, segments):
    zeros = torch.zeros(segments, src.shape[1], device=src.device)
    return zeros.index_add(0, ids, src.float()).to(src.dtype)
