"""Running maximum along rows with its positions: a gradient is the sum over the stretch that a maximum reigned.

Positions never decrease, so the places that one element dominates are a stretch which begins at that element. What
the backward needs of the positions is one byte each, whether a stretch begins there and whether one ends; a segmented
scan from the right sums every stretch and hands the total to its first place. No scatter, no atomics, one read of the
cotangent.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cummax_rows",
    "family": "reduction_stat",
    "op": "cummax",
    "schema": 1,
    "techniques": ("argmax-routing", "reverse-scan", "sorted-segments", "chunked", "strided-cotangent"),
    "saves": ("bounds: i8 (M, N)",),
    "grads": ("x",),
    "nondiff_outputs": (1,),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _later_unless_smaller(value1, place1, value2, place2):
    later = value2 >= value1
    return tl.where(later, value2, value1), tl.where(later, place2, place1)


@triton.jit
def _cummax_fwd(X, Value, Place, Bounds, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    lane = tl.broadcast_to(tl.arange(0, BLOCK_N)[None, :], (BLOCK_M, BLOCK_N))
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    holder = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, N, BLOCK_N):
        n = start + lane
        ok = (m < M) & (n < N)
        x = tl.load(X + m * N + n, mask=ok, other=float("-inf")).to(tl.float32)
        value, place = tl.associative_scan((x, n), 1, _later_unless_smaller)
        # The maximum of the tiles before stands where it is greater; of equals the later one reigns.
        value, place = _later_unless_smaller(top[:, None], holder[:, None], value, place)
        tl.store(Value + m * N + n, value, mask=ok)
        tl.store(Place + m * N + n, place.to(tl.int64), mask=ok)
        # Bit 0: a stretch begins here. Bit 1: one ends here, for the next element is no smaller.
        after = tl.load(X + m * N + n + 1, mask=(m < M) & (n + 1 < N), other=float("inf")).to(tl.float32)
        bounds = (place == n).to(tl.int32) | ((after >= value).to(tl.int32) << 1)
        tl.store(Bounds + m * N + n, bounds.to(tl.int8), mask=ok)
        # Of the last place: a maximum over places would meet the same value in many, and its derivative is anyone's.
        top = tl.sum(tl.where(lane == BLOCK_N - 1, value, 0.0), 1)
        holder = tl.sum(tl.where(lane == BLOCK_N - 1, place, 0), 1)


def _tile(N):
    BLOCK_N = max(16, min(1024, triton.next_power_of_2(N)))
    return 1024 // BLOCK_N, BLOCK_N


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    value = torch.empty_like(x)
    place = torch.empty(M, N, device=x.device, dtype=torch.int64)
    bounds = torch.empty(M, N, device=x.device, dtype=torch.int8)
    BLOCK_M, BLOCK_N = _tile(N)
    _cummax_fwd[(triton.cdiv(M, BLOCK_M),)](
        x, value, place, bounds, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return (value, place), (bounds,)


# --- backward ---
@triton.jit
def _until_begin(stop1, sum1, stop2, sum2):
    # Going left, part 2 adds what came from the right unless a stretch has begun in between.
    return stop1 | stop2, sum2 + tl.where(stop2 != 0, 0.0, sum1)


@triton.jit
def _cummax_bwd(DY, Bounds, DX, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    lane = tl.arange(0, BLOCK_N)[None, :]
    # The open stretch of the tile on the right.
    pending = tl.zeros((BLOCK_M,), tl.float32)
    tiles = tl.cdiv(N, BLOCK_N)
    for back in range(tiles):
        n = (tiles - 1 - back) * BLOCK_N + lane
        ok = (m < M) & (n < N)
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        bounds = tl.load(Bounds + m * N + n, mask=ok, other=3).to(tl.int32)
        closed, total = tl.associative_scan((bounds & 2, dy), 1, _until_begin, reverse=True)
        total += tl.where(closed != 0, 0.0, pending[:, None])
        tl.store(DX + m * N + n, tl.where((bounds & 1) != 0, total, 0.0), mask=ok)
        pending = tl.sum(tl.where(lane == 0, total, 0.0), 1)


def backward(saved, grad_value, grad_place, needs=None):
    (bounds,) = saved
    M, N = bounds.shape
    dx = torch.empty(M, N, device=grad_value.device, dtype=grad_value.dtype)
    # A row in one tile, where it fits 4096 places: no tile waits for the one on its right.
    BLOCK_N = max(16, min(4096, triton.next_power_of_2(N)))
    BLOCK_M = max(1, 1024 // BLOCK_N)
    _cummax_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_value, bounds, dx, M, N, *grad_value.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=max(4, BLOCK_N // 512),
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 9, "N": 128}, {"M": 3, "N": 2051}, {"M": 11, "N": 40, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # A slow rise, so that maxima change hands all along the row.
    x = torch.randn(M, N, generator=g) + torch.arange(N) / max(8, N // 16)
    return (x.to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    value, place = x.cummax(-1)
    return value, place
