"""Maximum of rows by group number: value and row number race in one 64-bit atomic, and the gradient goes to the winner.

Floats become integers of the same order, the row number fills the lower half with the lowest row on top: one atomic_max
settles value and argmax together, for any order of arrival. In the backward each row asks its group whether it won.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scatter_max",
    "family": "gather_scatter",
    "op": "scatter_max",
    "schema": 1,
    "techniques": ("argmax-routing", "gather-form", "strided-cotangent"),
    "saves": ("winner: i32 (G, D)",),
    "grads": ("src",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _race(Src, Group, Best, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    group = tl.load(Group + t, mask=t < T, other=0).to(tl.int64)
    ok = (t[:, None] < T) & (d[None, :] < D)
    bits = tl.load(Src + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    # Negative floats run backwards as integers: flipping all bits but the sign puts them in order.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    entry = (order << 32) | (0x7FFFFFFF - t)[:, None]
    tl.atomic_max(Best + group[:, None] * D + d[None, :], entry, mask=ok, sem="relaxed")


@triton.jit
def _finish(Src, Best, Y, Winner, G, D, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = g[:, None] * D + d[None, :]
    ok = (g[:, None] < G) & (d[None, :] < D)
    entry = tl.load(Best + at, mask=ok, other=0)
    # The lowest possible entry is an empty group's: no number has these bits.
    filled = ok & (entry != -0x8000000000000000)
    winner = tl.where(filled, 0x7FFFFFFF - (entry & 0x7FFFFFFF), -1)
    y = tl.load(Src + winner * D + d[None, :], mask=filled, other=0.0)
    tl.store(Y + at, y, mask=ok)
    tl.store(Winner + at, winner.to(tl.int32), mask=ok)


def _tile(D):
    BLOCK_D = min(256, triton.next_power_of_2(D))
    return 1024 // BLOCK_D, BLOCK_D


def forward(src, group, groups):
    """src (T, D), group (T) with values below `groups`; empty groups give zero."""
    src, group = src.contiguous(), group.contiguous()
    T, D = src.shape
    best = torch.full((groups, D), -(2**63), device=src.device, dtype=torch.int64)
    y = torch.empty(groups, D, device=src.device, dtype=src.dtype)
    winner = torch.empty(groups, D, device=src.device, dtype=torch.int32)
    rows, BLOCK_D = _tile(D)
    columns = triton.cdiv(D, BLOCK_D)
    _race[(triton.cdiv(T, rows), columns)](src, group, best, T, D, BLOCK_T=rows, BLOCK_D=BLOCK_D, num_warps=4)
    _finish[(triton.cdiv(groups, rows), columns)](
        src, best, y, winner, groups, D, BLOCK_G=rows, BLOCK_D=BLOCK_D, num_warps=4
    )
    return y, (group, winner)


# --- backward ---
@triton.jit
def _won_bwd(DY, Group, Winner, DSrc, T, D, dy_g, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    # Rows own their gradients: losers write their zeros themselves, and nothing is filled or added.
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    group = tl.load(Group + t, mask=t < T, other=0).to(tl.int64)[:, None]
    ok = (t[:, None] < T) & (d[None, :] < D)
    winner = tl.load(Winner + group * D + d[None, :], mask=ok, other=-1)
    won = ok & (winner == t[:, None])
    dy = tl.load(DY + group * dy_g + d[None, :].to(tl.int64) * dy_d, mask=won, other=0.0)
    tl.store(DSrc + t[:, None] * D + d[None, :], dy, mask=ok)


def backward(saved, grad_y, needs=None):
    group, winner = saved
    T, D = group.numel(), winner.shape[1]
    dsrc = torch.empty(T, D, device=grad_y.device, dtype=grad_y.dtype)
    rows, BLOCK_D = _tile(D)
    _won_bwd[(triton.cdiv(T, 2 * rows), triton.cdiv(D, BLOCK_D))](
        grad_y, group, winner, dsrc, T, D, *grad_y.stride(), BLOCK_T=2 * rows, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dsrc


# --- check ---
SWEEP = (
    {"T": 48, "D": 64, "groups": 10},
    {"T": 29, "D": 301, "groups": 7},
    {"T": 40, "D": 36, "groups": 5, "dtype": "bfloat16"},
)
BENCH = ({"T": 262144, "D": 256, "groups": 16384, "dtype": "bfloat16"},)


def make_args(T, D, groups, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    src = torch.randn(T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The last group stays empty.
    return src, torch.randint(0, max(1, groups - 1), (T,), generator=g).to(device), groups


def reference(src, group, groups):
    index = group[:, None].expand_as(src)
    zeros = torch.zeros(groups, src.shape[1], device=src.device, dtype=src.dtype)
    return zeros.scatter_reduce(0, index, src, "amax", include_self=False)
