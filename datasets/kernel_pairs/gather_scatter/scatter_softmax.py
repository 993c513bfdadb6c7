"""Softmax within groups given by an unsorted index: sums per group meet by atomics, everything else is gathered back.

Each direction is a scatter and a gather. The backward adds y dy into one number per group and head, then every element
reads the number of its group: dx = y (dy - dot[group]).
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scatter_softmax",
    "family": "gather_scatter",
    "op": "scatter_softmax",
    "schema": 1,
    "techniques": ("atomics", "delta-preprocess", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 (T, H)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _group_top(X, Group, Top, size, H, BLOCK: tl.constexpr):
    # Elements (t, h) as one flat stretch: H is the handful of heads of an edge.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(Group + i // H, mask=i < size, other=0).to(tl.int64) * H + i % H
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    tl.atomic_max(Top + slot, x, mask=i < size, sem="relaxed")


@triton.jit
def _group_norm(X, Group, Top, Norm, size, H, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(Group + i // H, mask=i < size, other=0).to(tl.int64) * H + i % H
    top = tl.load(Top + slot, mask=i < size, other=0.0)
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    tl.atomic_add(Norm + slot, tl.exp(x - top), mask=i < size, sem="relaxed")


@triton.jit
def _normalise(X, Group, Top, Norm, Y, size, H, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(Group + i // H, mask=i < size, other=0).to(tl.int64) * H + i % H
    top = tl.load(Top + slot, mask=i < size, other=0.0)
    norm = tl.load(Norm + slot, mask=i < size, other=1.0)
    x = tl.load(X + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(Y + i, tl.exp(x - top) / norm, mask=i < size)


def forward(x, group, groups):
    """x (T, H), group (T) with values below `groups`: softmax over the t of each group, head by head."""
    x, group = x.contiguous(), group.contiguous()
    T, H = x.shape
    y = torch.empty_like(x)
    top = torch.full((groups, H), float("-inf"), device=x.device, dtype=torch.float32)
    norm = torch.zeros(groups, H, device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(T * H, 1024),)
    _group_top[grid](x, group, top, T * H, H, BLOCK=1024)
    _group_norm[grid](x, group, top, norm, T * H, H, BLOCK=1024)
    _normalise[grid](x, group, top, norm, y, T * H, H, BLOCK=1024)
    return y, (y, group, groups)


# --- backward ---
@triton.jit
def _group_dots(
    DY, Y, Group, Dots, T, words, dy_words, dy_h, LANES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):
    # Heads come in words of LANES that exist as a whole: a lane loads and adds a word, and no mask cuts one.
    H = words * LANES
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    h = tl.arange(0, BLOCK_H)[None, :]
    ok = (t < T) & (h // LANES < words)
    group = tl.load(Group + t, mask=t < T, other=0).to(tl.int64)
    dy = tl.load(DY + t * (dy_words * LANES) + h.to(tl.int64) * dy_h, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(Y + t * H + h, mask=ok, other=0.0).to(tl.float32)
    tl.atomic_add(Dots + group * H + h, y * dy, mask=ok, sem="relaxed")


@triton.jit
def _group_softmax_bwd(
    DY, Y, Group, Dots, DX, T, words, dy_words, dy_h, LANES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):
    H = words * LANES
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    h = tl.arange(0, BLOCK_H)[None, :]
    ok = (t < T) & (h // LANES < words)
    group = tl.load(Group + t, mask=t < T, other=0).to(tl.int64)
    dy = tl.load(DY + t * (dy_words * LANES) + h.to(tl.int64) * dy_h, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(Y + t * H + h, mask=ok, other=0.0).to(tl.float32)
    dot = tl.load(Dots + group * H + h, mask=ok, other=0.0)
    tl.store(DX + t * H + h, y * (dy - dot), mask=ok)


def backward(saved, grad_y, needs=None):
    y, group, groups = saved
    T, H = y.shape
    dx = torch.empty_like(y)
    dots = torch.zeros(groups, H, device=y.device, dtype=torch.float32)
    BLOCK_H = triton.next_power_of_2(H)
    BLOCK_T = max(1, 2048 // BLOCK_H)
    dy_t, dy_h = grad_y.stride()
    LANES = next(lanes for lanes in (8, 4, 2, 1) if H % lanes == 0 and dy_t % lanes == 0)
    sizes, blocks = (T, H // LANES, dy_t // LANES, dy_h), {"LANES": LANES, "BLOCK_T": BLOCK_T, "BLOCK_H": BLOCK_H}
    grid = (triton.cdiv(T, BLOCK_T),)
    _group_dots[grid](grad_y, y, group, dots, *sizes, **blocks, num_warps=4)
    _group_softmax_bwd[grid](grad_y, y, group, dots, dx, *sizes, **blocks, num_warps=4)
    return dx


# --- check ---
SWEEP = (
    {"T": 64, "H": 4, "groups": 10},
    {"T": 229, "H": 3, "groups": 7},
    {"T": 40, "H": 36, "groups": 5, "dtype": "bfloat16"},
)
BENCH = ({"T": 4194304, "H": 8, "groups": 262144, "dtype": "bfloat16"},)


def make_args(T, H, groups, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (2.0 * torch.randn(T, H, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    # The last group stays empty.
    return x, torch.randint(0, max(1, groups - 1), (T,), generator=g).to(device), groups


def reference(x, group, groups):
    x32, index = x.float(), group[:, None].expand_as(x)
    zeros = torch.zeros(groups, x.shape[1], device=x.device)
    top = zeros.scatter_reduce(0, index, x32.detach(), "amax", include_self=False)
    e = (x32 - top[group]).exp()
    return (e / zeros.index_add(0, group, e)[group]).to(x.dtype)
