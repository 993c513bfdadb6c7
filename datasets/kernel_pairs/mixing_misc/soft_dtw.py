"""Soft dynamic time warping: a wavefront of anti-diagonals forwards, and a second one back that pushes path weights.

    R[i, j] = cost[i, j] + softmin(R[i-1, j-1], R[i-1, j], R[i, j-1]),    softmin(a..) = -gamma log sum exp(-a / gamma)

One program owns one cost matrix and keeps a diagonal in registers; neighbours come by shifting lanes. R is saved with
its diagonals as rows and read contiguously; cost and dcost, whose diagonals are strided, cost a sector a cell. Going
back, a cell's gradient splits over its three predecessors with the softmin's weights: two lie on the next diagonal, one
on the diagonal after it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "soft_dtw",
    "family": "mixing_misc",
    "op": "soft_dtw",
    "schema": 1,
    "techniques": ("reverse-scan", "row-local", "recompute", "strided-cotangent"),
    "saves": ("diagonals: fp32 (B, N + M - 1, N)",),
    "grads": ("cost",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _soft_dtw_fwd(Cost, Diagonals, Out, N, M, gamma, BLOCK_N: tl.constexpr):
    FAR: tl.constexpr = 1.0e10
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_N)
    lane_above = tl.maximum(i - 1, 0)
    cost_at = Cost + (matrix * N + i) * M - i
    diagonal_at = Diagonals + matrix * (N + M - 1) * N + i
    # R of the last diagonal and of the one before it, by row; cells outside the matrix are far away.
    last = tl.full((BLOCK_N,), FAR, tl.float32)
    # Farther still: two carried values that begin as one constant may be merged by a compiler.
    second = tl.full((BLOCK_N,), 2.0 * FAR, tl.float32)
    for step in range(N + M - 1):
        j = step - i
        inside = (i < N) & (j >= 0) & (j < M)
        cost = tl.load(cost_at + step, mask=inside, other=0.0).to(tl.float32)
        up = tl.where(i > 0, tl.gather(last, lane_above, 0), FAR)
        corner = tl.where(i > 0, tl.gather(second, lane_above, 0), tl.where(step == 0, 0.0, FAR))
        near = tl.minimum(tl.minimum(up, last), corner)
        weights = tl.exp((near - up) / gamma) + tl.exp((near - last) / gamma) + tl.exp((near - corner) / gamma)
        r = tl.where(inside, cost + near - gamma * tl.log(weights), FAR)
        tl.store(diagonal_at, r, mask=i < N)
        diagonal_at += N
        second = last
        last = r
    total = tl.sum(tl.where(i == N - 1, last, 0.0), 0)
    tl.store(Out + matrix, total)


def forward(cost, gamma=1.0):
    """Cost (B, N, M), N up to a few thousand; the result (B) is the soft length of the best alignment."""
    cost = cost.contiguous()
    B, N, M = cost.shape
    out = torch.empty(B, device=cost.device, dtype=cost.dtype)
    diagonals = torch.empty(B, N + M - 1, N, device=cost.device, dtype=torch.float32)
    BLOCK_N = triton.next_power_of_2(N)
    _soft_dtw_fwd[(B,)](cost, diagonals, out, N, M, gamma, BLOCK_N=BLOCK_N, num_warps=max(1, min(8, BLOCK_N // 128)))
    return out, (diagonals, cost, gamma)


# --- backward ---
@triton.jit
def _soft_dtw_bwd(DOut, Diagonals, DCost, N, M, gamma, stride, BLOCK_N: tl.constexpr):
    FAR: tl.constexpr = 1.0e10
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_N)
    lane_below = tl.minimum(i + 1, BLOCK_N - 1)
    steps = N + M - 1
    dcost_at = DCost + (matrix * N + i) * M - i
    diagonal_at = Diagonals + matrix * steps * N + i
    # What the cells of this diagonal have received, and what those of the next one have so far.
    here = tl.where(i == N - 1, tl.load(DOut + matrix * stride).to(tl.float32), 0.0)
    ahead = tl.zeros((BLOCK_N,), tl.float32)
    for back in range(steps):
        step = steps - 1 - back
        j = step - i
        inside = (i < N) & (j >= 0) & (j < M)
        tl.store(dcost_at + step, here, mask=inside)
        before = diagonal_at + (step - 1) * N
        up = tl.load(before - 1, mask=inside & (i > 0), other=FAR)
        left = tl.load(before, mask=inside & (j > 0), other=FAR)
        corner = tl.load(before - N - 1, mask=inside & (i > 0) & (j > 0), other=FAR)
        # The softmin's weights anew from its arguments: R minus cost would cancel.
        near = tl.minimum(tl.minimum(up, left), corner)
        to_up = tl.exp((near - up) / gamma)
        to_left = tl.exp((near - left) / gamma)
        to_corner = tl.exp((near - corner) / gamma)
        share = tl.where(inside, here / (to_up + to_left + to_corner), 0.0)
        # The receiver one row up takes from the lane below; beyond the last row nothing comes in.
        from_below = tl.where(i + 1 < N, tl.gather(share * to_up, lane_below, 0), 0.0)
        here = ahead + share * to_left + from_below
        ahead = tl.where(i + 1 < N, tl.gather(share * to_corner, lane_below, 0), 0.0)


def backward(saved, grad_out, needs=None):
    diagonals, cost, gamma = saved
    B, N, M = cost.shape
    dcost = torch.empty_like(cost)
    BLOCK_N = triton.next_power_of_2(N)
    _soft_dtw_bwd[(B,)](
        grad_out, diagonals, dcost, N, M, gamma, grad_out.stride(0),
        BLOCK_N=BLOCK_N, num_warps=max(1, min(8, BLOCK_N // 128)),
    )  # fmt: skip
    return dcost


# --- check ---
SWEEP = (
    {"B": 3, "N": 8, "M": 7},
    {"B": 2, "N": 11, "M": 19, "gamma": 0.5},
    {"B": 2, "N": 7, "M": 5, "dtype": "bfloat16"},
)
BENCH = ({"B": 4096, "N": 64, "M": 64, "dtype": "float32"},)


def make_args(B, N, M, gamma=1.0, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, N, M, generator=g).abs().to(device=device, dtype=getattr(torch, dtype)), gamma


def reference(cost, gamma=1.0):
    B, N, M = cost.shape
    cost32 = cost.float()
    rows = torch.arange(N, device=cost.device)
    far = torch.full((B, 1), 1.0e10, device=cost.device)
    last = second = far.expand(B, N)
    for step in range(N + M - 1):
        column = step - rows
        inside = (column >= 0) & (column < M)
        here = cost32[:, rows, column.clamp(0, M - 1)]
        corner = torch.cat((far * 0.0 if step == 0 else far, second[:, :-1]), 1)
        before = torch.stack((torch.cat((far, last[:, :-1]), 1), last, corner))
        r = here - gamma * torch.logsumexp(-before / gamma, 0)
        last, second = torch.where(inside, r, far), last
    return last[:, -1].to(cost.dtype)
