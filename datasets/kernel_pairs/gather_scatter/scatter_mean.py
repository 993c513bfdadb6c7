"""Mean of rows by group number, in any order: counts are saved, and the backward gathers dy / count without atomics."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scatter_mean",
    "family": "gather_scatter",
    "op": "scatter_mean",
    "schema": 1,
    "techniques": ("gather-form", "saved-statistics", "broadcast-adjoint", "strided-cotangent"),
    "saves": ("counts: i32 (G)",),
    "grads": ("src",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _group_sums(Src, Group, Sums, Counts, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    group = tl.load(Group + t, mask=t < T, other=0).to(tl.int64)
    ok = (t[:, None] < T) & (d[None, :] < D)
    src = tl.load(Src + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.atomic_add(Sums + group[:, None] * D + d[None, :], src, mask=ok, sem="relaxed")
    # The first column of programs counts for all.
    tl.atomic_add(Counts + group, 1, mask=(t < T) & (tl.program_id(1) == 0), sem="relaxed")


@triton.jit
def _group_means(Sums, Counts, Y, G, D, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = (g[:, None] < G) & (d[None, :] < D)
    # An empty group is zero, not 0/0.
    count = tl.maximum(tl.load(Counts + g, mask=g < G, other=1), 1).to(tl.float32)
    sums = tl.load(Sums + g[:, None] * D + d[None, :], mask=ok, other=0.0)
    tl.store(Y + g[:, None] * D + d[None, :], sums / count[:, None], mask=ok)


def _tile(D):
    BLOCK_D = min(256, triton.next_power_of_2(D))
    return 1024 // BLOCK_D, BLOCK_D


def forward(src, group, groups):
    """src (T, D), group (T) with values below `groups`."""
    src, group = src.contiguous(), group.contiguous()
    T, D = src.shape
    sums = torch.zeros(groups, D, device=src.device, dtype=torch.float32)
    counts = torch.zeros(groups, device=src.device, dtype=torch.int32)
    y = torch.empty(groups, D, device=src.device, dtype=src.dtype)
    rows, BLOCK_D = _tile(D)
    columns = triton.cdiv(D, BLOCK_D)
    _group_sums[(triton.cdiv(T, rows), columns)](
        src, group, sums, counts, T, D, BLOCK_T=rows, BLOCK_D=BLOCK_D, num_warps=4
    )
    _group_means[(triton.cdiv(groups, rows), columns)](
        sums, counts, y, groups, D, BLOCK_G=rows, BLOCK_D=BLOCK_D, num_warps=4
    )
    return y, (group, counts)


# --- backward ---
@triton.jit
def _mean_bwd(DY, Group, Counts, DSrc, T, D, dy_g, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    group = tl.load(Group + t, mask=t < T, other=0).to(tl.int64)
    # A group that a row belongs to has been counted: no guard is needed.
    share = 1.0 / tl.load(Counts + group, mask=t < T, other=1).to(tl.float32)
    ok = (t[:, None] < T) & (d < D)
    dy = tl.load(DY + group[:, None] * dy_g + d.to(tl.int64) * dy_d, mask=ok, other=0.0).to(tl.float32)
    tl.store(DSrc + t[:, None] * D + d, dy * share[:, None], mask=ok)


def backward(saved, grad_y, needs=None):
    group, counts = saved
    T, D = group.numel(), grad_y.shape[1]
    dsrc = torch.empty(T, D, device=grad_y.device, dtype=grad_y.dtype)
    rows, BLOCK_D = _tile(D)
    _mean_bwd[(triton.cdiv(T, 2 * rows), triton.cdiv(D, BLOCK_D))](
        grad_y, group, counts, dsrc, T, D, *grad_y.stride(), BLOCK_T=2 * rows, BLOCK_D=BLOCK_D, num_warps=4
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
    sums = torch.zeros(groups, src.shape[1], device=src.device).index_add(0, group, src.float())
    counts = torch.zeros(groups, device=src.device).index_add(0, group, torch.ones_like(group, dtype=torch.float32))
    return (sums / counts.clamp(min=1.0)[:, None]).to(src.dtype)
