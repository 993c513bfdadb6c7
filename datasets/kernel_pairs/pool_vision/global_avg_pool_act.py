"""Global average of SiLU over a plane: the backward spreads dy / (H W) and computes silu' from x again.

The forward owns planes, small ones as neighbours in a tile, and never writes the activation. The backward has no sum
at all, so it needs no planes either: its tile is a stretch of memory, and an element asks which plane it lies in.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "global_avg_pool_act",
    "family": "pool_vision",
    "op": "global_avg_pool_silu",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "recompute", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gap_silu_fwd(X, Y, planes, size, ROWS: tl.constexpr, COLS: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, size, COLS):
        pixel = start + tl.arange(0, COLS)
        inside = (plane[:, None] < planes) & (pixel[None, :] < size)
        # SiLU of the zeros outside is zero.
        x = tl.load(X + plane[:, None] * size + pixel[None, :], mask=inside, other=0.0).to(tl.float32)
        total += x * tl.sigmoid(x)
    tl.store(Y + plane, tl.sum(total, 1) / size, mask=plane < planes)


def _tile(size):
    # About 2048 pixels: 16 for each thread of four warps.
    COLS = min(2048, triton.next_power_of_2(size))
    return 2048 // COLS, COLS


def forward(x):
    x = x.contiguous()
    B, C, H, W = x.shape
    ROWS, COLS = _tile(H * W)
    y = torch.empty(B, C, device=x.device, dtype=x.dtype)
    _gap_silu_fwd[(triton.cdiv(B * C, ROWS),)](x, y, B * C, H * W, ROWS=ROWS, COLS=COLS, num_warps=4)
    return y, (x,)


# --- backward ---
@triton.jit
def _share_of(DY, plane, planes, dy_b, dy_c, C: tl.constexpr, SIZE: tl.constexpr):
    at = (plane // C).to(tl.int64) * dy_b + (plane % C).to(tl.int64) * dy_c
    return tl.load(DY + at, mask=plane < planes, other=0.0).to(tl.float32) * (1.0 / SIZE)


@triton.jit
def _gap_silu_bwd(
    DY, X, DX, total, dy_b, dy_c, C: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr
):
    # 49 pixels of two bytes begin at no border of a word: only tiles that ignore planes load 16 bytes at a time. A
    # run of RUN <= SIZE pixels meets two planes at most, so that divisions, by constants, are once for a run.
    base = tl.program_id(0).to(tl.int64) * (RUN * RUNS)
    lane = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(X + base + lane, mask=base + lane < total, other=0.0).to(tl.float32)
    first = base // SIZE
    pixel = (base - first * SIZE).to(tl.int32) + tl.arange(0, RUNS) * RUN
    plane = first.to(tl.int32) + pixel // SIZE
    planes = total // SIZE
    share = _share_of(DY, plane, planes, dy_b, dy_c, C, SIZE)
    next_share = _share_of(DY, plane + 1, planes, dy_b, dy_c, C, SIZE)
    here = (pixel % SIZE)[:, None] + tl.arange(0, RUN)[None, :] < SIZE
    gate = tl.sigmoid(x)
    dx = tl.where(here, share[:, None], next_share[:, None]) * gate * (1.0 + x * (1.0 - gate))
    tl.store(DX + base + lane, dx, mask=base + lane < total)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    C, H, W = x.shape[1:]
    dx = torch.empty_like(x)
    run = next(size for size in (8, 4, 2, 1) if size <= H * W)
    _gap_silu_bwd[(triton.cdiv(x.numel(), 2048),)](
        grad_y, x, dx, x.numel(), *grad_y.stride(), C=C, SIZE=H * W, RUN=run, RUNS=2048 // run, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "C": 8, "H": 8, "W": 8},
    {"B": 1, "C": 3, "H": 37, "W": 61},
    {"B": 3, "C": 5, "H": 7, "W": 7, "dtype": "bfloat16"},
    {"B": 1, "C": 2, "H": 9, "W": 11, "dtype": "float16"},
)
BENCH = (
    {"B": 1024, "C": 1280, "H": 7, "W": 7, "dtype": "bfloat16"},
    {"B": 32, "C": 256, "H": 56, "W": 56, "dtype": "bfloat16"},
)


def make_args(B, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.nn.functional.silu(x.float()).mean((2, 3)).to(x.dtype)
