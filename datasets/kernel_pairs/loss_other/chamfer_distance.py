"""Chamfer distance of two point clouds: the nearest neighbour's index is saved, and routes the gradient to both ends.

L = mean over p of |p - q[near(p)]|^2 + mean over q of |q - p[near(q)]|^2.
Each term moves both of its points. The point that searched is visited once: its owner gathers the found point and
stores the difference. The found point may have been found by many: there the difference is added atomically. Launches
follow one another, so that the plain stores of a cloud come before other points' atomics to it: nothing is zeroed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "chamfer_distance",
    "family": "loss_other",
    "op": "chamfer_distance",
    "schema": 1,
    "techniques": ("argmax-routing", "atomics", "gather-form", "broadcast-adjoint"),
    "saves": ("near_p: int32 (B, N)", "near_q: int32 (B, M)"),
    "grads": ("p", "q"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _nearest(P, Q, Near, Parts, N, M, weight, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = P + (batch * N + n) * 3
    x = tl.load(p, mask=n < N, other=0.0)
    y = tl.load(p + 1, mask=n < N, other=0.0)
    z = tl.load(p + 2, mask=n < N, other=0.0)
    best = tl.full((BLOCK_N,), float("inf"), tl.float32)
    near = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = Q + (batch * M + m) * 3
        # Differences rather than |p|^2 + |q|^2 - 2 p q: near points are where that would cancel.
        dx = x[:, None] - tl.load(q, mask=m < M, other=0.0)[None, :]
        dy = y[:, None] - tl.load(q + 1, mask=m < M, other=0.0)[None, :]
        dz = z[:, None] - tl.load(q + 2, mask=m < M, other=0.0)[None, :]
        d = tl.where(m[None, :] < M, dx * dx + dy * dy + dz * dz, float("inf"))
        here = tl.argmin(d, 1, tie_break_left=True)
        closest = tl.sum(tl.where(tl.arange(0, BLOCK_M)[None, :] == here[:, None], d, 0.0), 1)
        near = tl.where(closest < best, start + here, near)
        best = tl.where(closest < best, closest, best)
    tl.store(Near + batch * N + n, near, mask=n < N)
    total = weight * tl.sum(tl.where(n < N, best, 0.0), 0)
    tl.store(Parts + batch * tl.num_programs(0) + tl.program_id(0), total)


def _search(p, q, near, parts):
    B, N, M = p.shape[0], p.shape[1], q.shape[1]
    _nearest[(triton.cdiv(N, 64), B)](p, q, near, parts, N, M, 1.0 / (B * N), BLOCK_N=64, BLOCK_M=64, num_warps=8)


def forward(p, q):
    p, q = p.contiguous(), q.contiguous()
    B, N, M = p.shape[0], p.shape[1], q.shape[1]
    near_p = torch.empty(B, N, device=p.device, dtype=torch.int32)
    near_q = torch.empty(B, M, device=p.device, dtype=torch.int32)
    tiles_p = B * triton.cdiv(N, 64)
    parts = torch.empty(tiles_p + B * triton.cdiv(M, 64), device=p.device, dtype=torch.float32)
    _search(p, q, near_p, parts)
    _search(q, p, near_q, parts[tiles_p:])
    return parts.sum(), (p, q, near_p, near_q)


# --- backward ---
@triton.jit
def _route(DLoss, P, Q, Near, DP, DQ, N, M, factor, STORE: tl.constexpr, SCATTER: tl.constexpr, BLOCK: tl.constexpr):
    # 2 factor (p - q): stored for the points that searched, taken off the points that they found.
    batch = tl.program_id(1).to(tl.int64)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = flat < 3 * N
    point = flat // 3
    near = tl.load(Near + batch * N + point, mask=live, other=0)
    found = (batch * M + near) * 3 + flat % 3
    mine = batch * N * 3 + flat
    gap = tl.load(P + mine, mask=live, other=0.0) - tl.load(Q + found, mask=live, other=0.0)
    pull = 2.0 * factor * tl.load(DLoss) * gap
    if STORE:
        tl.store(DP + mine, pull, mask=live)
    if SCATTER:
        tl.atomic_add(DQ + found, -pull, mask=live, sem="relaxed")


def backward(saved, grad_loss, needs=(True, True)):
    p, q, near_p, near_q = saved
    B, N, M = p.shape[0], p.shape[1], q.shape[1]
    need_p, need_q = needs
    dp = torch.empty_like(p) if need_p else None
    dq = torch.empty_like(q) if need_q else None
    grid_p, grid_q = (triton.cdiv(3 * N, 256), B), (triton.cdiv(3 * M, 256), B)
    from_p = (grad_loss, p, q, near_p, dp, dq, N, M, 1.0 / (B * N))
    from_q = (grad_loss, q, p, near_q, dq, dp, M, N, 1.0 / (B * M))
    # dp is stored, then dq is stored while its differences are scattered to dp, then dp's to dq.
    if need_p:
        _route[grid_p](*from_p, STORE=True, SCATTER=False, BLOCK=256, num_warps=4)
    _route[grid_q](*from_q, STORE=need_q, SCATTER=need_p, BLOCK=256, num_warps=4)
    if need_q:
        _route[grid_p](*from_p, STORE=False, SCATTER=True, BLOCK=256, num_warps=4)
    return dp, dq


# --- check ---
SWEEP = ({"B": 2, "N": 64, "M": 64}, {"B": 1, "N": 75, "M": 130}, {"B": 3, "N": 33, "M": 17})
BENCH = ({"B": 128, "N": 16384, "M": 8192, "dtype": "float32"},)


def make_args(B, N, M, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    clouds = (torch.randn(B, N, 3, generator=g), torch.randn(B, M, 3, generator=g) * 1.2 + 0.1)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in clouds)


def reference(p, q):
    # Only the nearest points take part: the search needs no gradient.
    with torch.no_grad():
        near_p, near_q = (
            torch.cat([torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").argmin(2) for a, b in pairs])
            for pairs in (zip(p.split(1), q.split(1), strict=True), zip(q.split(1), p.split(1), strict=True))
        )
    to_p, to_q = (torch.take_along_dim(x, near[..., None], 1) for x, near in ((q, near_p), (p, near_q)))
    return (p - to_p).square().sum(-1).mean() + (q - to_q).square().sum(-1).mean()
