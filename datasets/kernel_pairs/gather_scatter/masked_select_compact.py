"""Rows kept by a mask, packed together: their ranks come from a prefix sum and are saved, the backward gathers by rank.

A kept row t goes to row rank[t] of the result. Read the other way the same table says where each row finds its
cotangent: every row of dx is written once, dropped ones with zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "masked_select_compact",
    "family": "gather_scatter",
    "op": "masked_select",
    "schema": 1,
    "techniques": ("gather-form", "inverse-map", "masking", "strided-cotangent"),
    "saves": ("rank: i32 (T)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _count_kept(Keep, Counts, T, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(Keep + t, mask=t < T, other=0) != 0
    tl.store(Counts + tl.program_id(0), tl.sum(keep.to(tl.int32), 0))


@triton.jit
def _rank_kept(Keep, Counts, Rank, T, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    # Each program adds up the counts before its own: reading a few kilobytes out of L2 replaces a scan of the counts.
    pid = tl.program_id(0)
    before = 0
    for start in range(0, pid, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        before += tl.sum(tl.load(Counts + s, mask=s < pid, other=0), 0)
    t = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = (tl.load(Keep + t, mask=t < T, other=0) != 0).to(tl.int32)
    rank = before + tl.cumsum(keep, 0) - 1
    tl.store(Rank + t, tl.where(keep != 0, rank, -1), mask=t < T)


@triton.jit
def _pack_kept(X, Rank, Y, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    rank = tl.load(Rank + t, mask=t < T, other=-1).to(tl.int64)
    kept = (rank >= 0) & (d < D)
    tl.store(Y + rank * D + d, tl.load(X + t * D + d, mask=kept), mask=kept)


def _tile(T, D):
    BLOCK_D = min(512, triton.next_power_of_2(D))
    BLOCK_T = 4096 // BLOCK_D
    return (triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D)), BLOCK_T, BLOCK_D


def forward(x, keep, kept):
    """x (T, D), keep (T) of bool or int8 with `kept` entries set, a number that the host knows already."""
    x, keep = x.contiguous(), keep.contiguous()
    if keep.dtype is torch.bool:
        keep = keep.view(torch.int8)
    T, D = x.shape
    tiles = triton.cdiv(T, 1024)
    counts = torch.empty(tiles, device=x.device, dtype=torch.int32)
    rank = torch.empty(T, device=x.device, dtype=torch.int32)
    y = torch.empty(kept, D, device=x.device, dtype=x.dtype)
    _count_kept[(tiles,)](keep, counts, T, BLOCK=1024)
    _rank_kept[(tiles,)](keep, counts, rank, T, BLOCK=1024, BLOCK_S=1024)
    grid, BLOCK_T, BLOCK_D = _tile(T, D)
    _pack_kept[grid](x, rank, y, T, D, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4)
    return y, (rank,)


# --- backward ---
@triton.jit
def _unpack_bwd(DY, Rank, DX, T, D, dy_r, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
    ok = (t < T) & (d < D)
    rank = tl.load(Rank + t, mask=t < T, other=-1).to(tl.int64)
    # Ranks rise along t: what is read is contiguous, too.
    dy = tl.load(DY + rank * dy_r + d * dy_d, mask=ok & (rank >= 0), other=0.0)
    tl.store(DX + t * D + d, dy, mask=ok)


def backward(saved, grad_y, needs=None):
    (rank,) = saved
    T, D = rank.numel(), grad_y.shape[1]
    dx = torch.empty(T, D, device=grad_y.device, dtype=grad_y.dtype)
    grid, BLOCK_T, BLOCK_D = _tile(T, D)
    _unpack_bwd[grid](grad_y, rank, dx, T, D, *grad_y.stride(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4)
    return dx


# --- check ---
SWEEP = ({"T": 96, "D": 64}, {"T": 2203, "D": 3}, {"T": 50, "D": 40, "dtype": "bfloat16"})
BENCH = ({"T": 262144, "D": 256, "dtype": "bfloat16"},)


def make_args(T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    keep = torch.rand(T, generator=g) < 0.6
    keep[-1] = True
    return x, keep.to(torch.int8).to(device), int(keep.sum())


def reference(x, keep, kept):
    return x[keep != 0]
