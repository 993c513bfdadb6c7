"""Nearest upsampling by whole factors: each pixel of dx is the sum of its UP * ACROSS children, loaded as whole runs.

Images, channels and rows of the input are one axis: child rows of input row r are r UP to r UP + UP - 1 throughout. The
tile's third axis is the child column, so that a row of children is read as one contiguous run whatever the factor, and
the sum over it stays within threads.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "upsample_nearest",
    "family": "pool_vision",
    "op": "upsample_nearest2d",
    "schema": 1,
    "techniques": ("gather-form", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _nearest_fwd(
    X, Y, rows, W, UP: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, CHILDREN: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    child = tl.arange(0, CHILDREN)
    inside = (r[:, None] < rows) & (w[None, :] < W)
    x = tl.load(X + r[:, None] * W + w[None, :], mask=inside, other=0.0)
    run = w[:, None] * ACROSS + child[None, :]
    for i in tl.static_range(UP):
        y_at = ((r * UP + i) * W * ACROSS)[:, None, None] + run[None, :, :]
        tl.store(Y + y_at, x[:, :, None], mask=inside[:, :, None] & (child < ACROSS)[None, None, :])


def _tiles(rows, W, across):
    CHILDREN = triton.next_power_of_2(across)
    BLOCK_W = min(128, triton.next_power_of_2(W))
    BLOCK_R = min(max(1, 2048 // (BLOCK_W * CHILDREN)), triton.next_power_of_2(rows))
    grid = (triton.cdiv(rows, BLOCK_R), triton.cdiv(W, BLOCK_W))
    return grid, {"BLOCK_R": BLOCK_R, "BLOCK_W": BLOCK_W, "CHILDREN": CHILDREN, "num_warps": 4}


def forward(x, up, across):
    x = x.contiguous()
    B, C, H, W = x.shape
    y = torch.empty(B, C, H * up, W * across, device=x.device, dtype=x.dtype)
    grid, blocks = _tiles(B * C * H, W, across)
    _nearest_fwd[grid](x, y, B * C * H, W, UP=up, ACROSS=across, **blocks)
    return y, (up, across)


# --- backward ---
@triton.jit
def _nearest_bwd(
    DY, DX, rows, C, H, W, dy_b, dy_c, dy_h, dy_w, UP: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, CHILDREN: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    child = tl.arange(0, CHILDREN)
    inside = (r[:, None] < rows) & (w[None, :] < W)
    # Cotangents may lie anyhow: image, channel and row are told apart, once for each row of the tile.
    row = DY + (r // H // C).to(tl.int64) * dy_b + (r // H % C).to(tl.int64) * dy_c + (r % H * UP).to(tl.int64) * dy_h
    dx = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    if ACROSS == CHILDREN:
        # No gap between children of neighbours: a row of the tile is one run, read in whole vectors and folded after.
        run = tl.program_id(1) * BLOCK_W * CHILDREN + tl.arange(0, BLOCK_W * CHILDREN)
        mine = (r[:, None] < rows) & (run[None, :] // CHILDREN < W)
        for i in tl.static_range(UP):
            children = tl.load((row + i * dy_h)[:, None] + run.to(tl.int64)[None, :] * dy_w, mask=mine, other=0.0)
            dx += tl.sum(tl.reshape(children.to(tl.float32), (BLOCK_R, BLOCK_W, CHILDREN)), 2)
    else:
        run = (w[:, None] * ACROSS + child[None, :]).to(tl.int64) * dy_w
        mine = inside[:, :, None] & (child < ACROSS)[None, None, :]
        for i in tl.static_range(UP):
            children = tl.load((row + i * dy_h)[:, None, None] + run[None, :, :], mask=mine, other=0.0)
            dx += tl.sum(children.to(tl.float32), 2)
    tl.store(DX + r.to(tl.int64)[:, None] * W + w[None, :], dx, mask=inside)


def backward(saved, grad_y, needs=None):
    up, across = saved
    B, C = grad_y.shape[:2]
    H, W = grad_y.shape[2] // up, grad_y.shape[3] // across
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    grid, blocks = _tiles(B * C * H, W, across)
    _nearest_bwd[grid](grad_y, dx, B * C * H, C, H, W, *grad_y.stride(), UP=up, ACROSS=across, **blocks)
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 8, "W": 16, "up": 2, "across": 2},
    {"B": 2, "C": 3, "H": 7, "W": 19, "up": 3, "across": 3},
    {"B": 1, "C": 2, "H": 5, "W": 12, "up": 1, "across": 5, "dtype": "bfloat16"},
    {"B": 2, "C": 1, "H": 9, "W": 4, "up": 4, "across": 1, "dtype": "float16"},
)
BENCH = ({"B": 32, "C": 128, "H": 64, "W": 64, "up": 2, "across": 2, "dtype": "bfloat16"},)


def make_args(B, C, H, W, up, across, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, up, across


def reference(x, up, across):
    H, W = x.shape[2:]
    return torch.nn.functional.interpolate(x, size=(H * up, W * across), mode="nearest-exact")
