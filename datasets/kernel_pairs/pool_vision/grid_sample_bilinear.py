"""Bilinear grid sampling with zeros outside: dx by atomics at four corners, dgrid from sums over channels per corner.

A program owns output pixels and walks the channels, so that places and shares are computed once. The gradient of
a place needs of all channels only four numbers, the sums of dy x at the corners; their differences along each axis,
weighted by the other axis' shares, are the gradient. dx collects in fp32; the channels of an output pixel lie a plane
apart, neighbouring pixels side by side, as the places of a smooth grid do.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "grid_sample_bilinear",
    "family": "pool_vision",
    "op": "grid_sample",
    "schema": 1,
    "techniques": ("one-launch", "atomics", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "grid"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _before(Grid, at, size, live):
    """The pixel at or before a place given from -1 to 1 between the image's edges, and the share of the next one."""
    place = ((tl.load(Grid + at, mask=live, other=0.0).to(tl.float32) + 1.0) * size - 1.0) * 0.5
    first = tl.floor(place)
    return first.to(tl.int32), place - first


@triton.jit
def _grid_sample_fwd(X, Grid, Y, C, H, W, P, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr):
    tiles = tl.cdiv(P, BLOCK_P)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    live = p < P
    w, right = _before(Grid, 2 * (image * P + p), W, live)
    h, down = _before(Grid, 2 * (image * P + p) + 1, H, live)
    top = live & (h >= 0) & (h < H)
    low = live & (h >= -1) & (h < H - 1)
    left_in = (w >= 0) & (w < W)
    right_in = (w >= -1) & (w < W - 1)
    at = (h * W + w)[None, :]
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        there = c[:, None] < C
        plane = X + (image * C + c[:, None]) * H * W + at
        y = tl.load(plane, mask=there & (top & left_in)[None, :], other=0.0) * ((1 - down) * (1 - right))[None, :]
        y += tl.load(plane + 1, mask=there & (top & right_in)[None, :], other=0.0) * ((1 - down) * right)[None, :]
        y += tl.load(plane + W, mask=there & (low & left_in)[None, :], other=0.0) * (down * (1 - right))[None, :]
        y += tl.load(plane + W + 1, mask=there & (low & right_in)[None, :], other=0.0) * (down * right)[None, :]
        tl.store(Y + (image * C + c[:, None]) * P + p[None, :], y, mask=there & live[None, :])


def _tiles(C, P):
    return {"BLOCK_C": min(8, triton.next_power_of_2(C)), "BLOCK_P": min(128, triton.next_power_of_2(P))}


def forward(x, grid):
    x, grid = x.contiguous(), grid.contiguous()
    B, C, H, W = x.shape
    HO, WO = grid.shape[1:3]
    y = torch.empty(B, C, HO, WO, device=x.device, dtype=x.dtype)
    tiles = _tiles(C, HO * WO)
    _grid_sample_fwd[(B * triton.cdiv(HO * WO, tiles["BLOCK_P"]),)](x, grid, y, C, H, W, HO * WO, **tiles, num_warps=4)
    return y, (x, grid)


# --- backward ---
@triton.jit
def _corner(X, DX, at, inside, dy, share):
    """Adds the corner's share of dy to dx there, and returns the sums over channels of dy x."""
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(DX + at, dy * share[None, :], mask=inside, sem="relaxed")
    return tl.sum(dy * x, 0)


@triton.jit
def _grid_sample_bwd(
    DY, X, Grid, DX, DGrid, C, H, W, P, WO, dy_b, dy_c, dy_h, dy_w, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(P, BLOCK_P)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    live = p < P
    w, right = _before(Grid, 2 * (image * P + p), W, live)
    h, down = _before(Grid, 2 * (image * P + p) + 1, H, live)
    up = 1.0 - down
    left = 1.0 - right
    top = live & (h >= 0) & (h < H)
    low = live & (h >= -1) & (h < H - 1)
    left_in = (w >= 0) & (w < W)
    right_in = (w >= -1) & (w < W - 1)
    DY += image * dy_b + (p // WO).to(tl.int64)[None, :] * dy_h + (p % WO).to(tl.int64)[None, :] * dy_w
    top_left = tl.zeros((BLOCK_P,), tl.float32)
    top_right = tl.zeros((BLOCK_P,), tl.float32)
    low_left = tl.zeros((BLOCK_P,), tl.float32)
    low_right = tl.zeros((BLOCK_P,), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        there = c[:, None] < C
        dy = tl.load(DY + c.to(tl.int64)[:, None] * dy_c, mask=there & live[None, :], other=0.0).to(tl.float32)
        at = (image * C + c[:, None]) * H * W + (h * W + w)[None, :]
        top_left += _corner(X, DX, at, there & (top & left_in)[None, :], dy, up * left)
        top_right += _corner(X, DX, at + 1, there & (top & right_in)[None, :], dy, up * right)
        low_left += _corner(X, DX, at + W, there & (low & left_in)[None, :], dy, down * left)
        low_right += _corner(X, DX, at + W + 1, there & (low & right_in)[None, :], dy, down * right)
    # From -1 to 1 is the width of the image.
    across = (up * (top_right - top_left) + down * (low_right - low_left)) * (0.5 * W)
    along = (left * (low_left - top_left) + right * (low_right - top_right)) * (0.5 * H)
    tl.store(DGrid + 2 * (image * P + p), across, mask=live)
    tl.store(DGrid + 2 * (image * P + p) + 1, along, mask=live)


def backward(saved, grad_y, needs=None):
    x, grid = saved
    B, C, H, W = x.shape
    HO, WO = grid.shape[1:3]
    dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    dgrid = torch.empty_like(grid)
    tiles = _tiles(C, HO * WO)
    _grid_sample_bwd[(B * triton.cdiv(HO * WO, tiles["BLOCK_P"]),)](
        grad_y, x, grid, dx, dgrid, C, H, W, HO * WO, WO, *grad_y.stride(), **tiles, num_warps=4
    )
    return dx.to(x.dtype), dgrid


# --- check ---
SWEEP = (
    {"B": 1, "C": 4, "H": 8, "W": 8, "HO": 8, "WO": 16},
    {"B": 2, "C": 11, "H": 5, "W": 9, "HO": 7, "WO": 19},
    {"B": 1, "C": 3, "H": 1, "W": 6, "HO": 4, "WO": 5, "dtype": "bfloat16"},
    {"B": 2, "C": 2, "H": 7, "W": 3, "HO": 3, "WO": 4, "dtype": "float16"},
)
BENCH = ({"B": 16, "C": 64, "H": 128, "W": 128, "HO": 128, "WO": 128, "dtype": "bfloat16"},)


def make_args(B, C, H, W, HO, WO, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, C, H, W, generator=g)
    # A resized image, bent by a few pixels; some places leave it. The grid keeps fp32: bf16 has no pixel's precision.
    rows, cols = ((torch.arange(size) + 0.5) * (2.0 / size) - 1.0 for size in (HO, WO))
    even = torch.stack(torch.meshgrid(rows, cols, indexing="ij")[::-1], -1)
    bent = torch.randn(B, HO, WO, 2, generator=g) * torch.tensor([4.0 / W, 4.0 / H])
    return x.to(device=device, dtype=getattr(torch, dtype)), (even + bent).to(device)


def reference(x, grid):
    return torch.nn.functional.grid_sample(x.float(), grid.float(), align_corners=False).to(x.dtype)
