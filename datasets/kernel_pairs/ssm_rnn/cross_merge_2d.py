"""VMamba's cross merge: four scanned sequences back into one image with channels last; each source gets dout's copy.

out[h, w, c] = y[0, c, h W + w] + y[1, c, w H + h] + y[2, c, L - 1 - h W - w] + y[3, c, L - 1 - w H - h],    L = H W
The adjoint of the sum replicates: it reads a cotangent once and writes it to four places. There are three orders of
memory, with c, w or h side by side. A tile is a cube with 32 bytes or more along each axis, so that whichever axis is
contiguous, whole sectors move; registers hold it once and are rearranged for the orders. The backward turns a cube
where it reads, for no store may run backwards: its words would be as short as an element.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cross_merge_2d",
    "family": "ssm_rnn",
    "op": "cross_merge",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "inverse-map", "shared-gradient", "strided-cotangent"),
    "saves": (),
    "grads": ("y",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _cube(tiles_w, tiles, C, H, W, SIDE: tl.constexpr):
    """Channel, row and column of a cube's elements as axes 0, 1, 2, and which of them exist."""
    tile = tl.program_id(1)
    c = (tile // tiles * SIDE + tl.arange(0, SIDE))[:, None, None]
    h = (tile % tiles // tiles_w * SIDE + tl.arange(0, SIDE))[None, :, None]
    w = (tile % tiles_w * SIDE + tl.arange(0, SIDE))[None, None, :]
    return c, h, w, (c < C) & (h < H) & (w < W)


@triton.jit
def _cross_merge_fwd(Y, OUT, C, H, W, tiles_w, tiles, SIDE: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    c, h, w, inside = _cube(tiles_w, tiles, C, H, W, SIDE)
    L = H * W
    y = Y + b * 4 * C * L + c * L
    merged = tl.load(y + h * W + w, mask=inside, other=0.0).to(tl.float32)
    merged += tl.load(y + 2 * C * L + (L - 1 - h * W - w), mask=inside, other=0.0).to(tl.float32)
    crossed = tl.load(y + C * L + w * H + h, mask=inside, other=0.0).to(tl.float32)
    crossed += tl.load(y + 3 * C * L + (L - 1 - w * H - h), mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + ((b * H + h) * W + w) * C + c, merged + crossed, mask=inside)


def _launch(y, H, W):
    B, _, C, _ = y.shape
    side = 32 // y.element_size()
    tiles_w = triton.cdiv(W, side)
    tiles = triton.cdiv(H, side) * tiles_w
    return (B, triton.cdiv(C, side) * tiles), tiles_w, tiles, {"SIDE": side, "num_warps": 8 if side == 16 else 2}


def forward(y, height, width):
    # y (B, 4, C, height width), out (B, height, width, C).
    y = y.contiguous()
    B, _, C, _ = y.shape
    out = torch.empty(B, height, width, C, device=y.device, dtype=y.dtype)
    grid, tiles_w, tiles, launch = _launch(y, height, width)
    _cross_merge_fwd[grid](y, out, C, height, width, tiles_w, tiles, **launch)
    return out, (y, height, width)


# --- backward ---
@triton.jit
def _cross_merge_bwd(DOut, DY, C, H, W, tiles_w, tiles, do_b, do_h, do_w, do_c, SIDE: tl.constexpr):
    # Half of the programs write the two sequences in the image's order, half the two that run backwards. These turn the
    # pixels where they read, channel by channel: what is written ascends, and leaves in words of 16 bytes.
    backwards = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    c, h, w, inside = _cube(tiles_w, tiles, C, H, W, SIDE)
    row = tl.where(backwards == 1, H - 1 - h, h).to(tl.int64)
    column = tl.where(backwards == 1, W - 1 - w, w).to(tl.int64)
    g = tl.load(DOut + b * do_b + c.to(tl.int64) * do_c + row * do_h + column * do_w, mask=inside, other=0.0)
    L = H * W
    dy = DY + (b * 4 + 2 * backwards) * C * L + c * L
    tl.store(dy + h * W + w, g, mask=inside)
    tl.store(dy + C * L + w * H + h, g, mask=inside)


def backward(saved, grad_out, needs=None):
    y, height, width = saved
    dy = torch.empty_like(y)
    (images, cubes), tiles_w, tiles, launch = _launch(y, height, width)
    # Both directions of an image run at about the same time, so that the second finds it in L2.
    _cross_merge_bwd[(2, cubes, images)](
        grad_out, dy, y.shape[2], height, width, tiles_w, tiles, *grad_out.stride(), **launch
    )
    return dy


# --- check ---
SWEEP = (
    {"B": 2, "C": 8, "H": 8, "W": 16},
    {"B": 1, "C": 19, "H": 13, "W": 21, "dtype": "float16"},
    {"B": 2, "C": 5, "H": 7, "W": 9, "dtype": "bfloat16"},
)
BENCH = ({"B": 32, "C": 192, "H": 64, "W": 64, "dtype": "bfloat16"},)


def make_args(B, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, 4, C, H * W, generator=g).to(device=device, dtype=getattr(torch, dtype)), H, W


def reference(y, height, width):
    yf = y.float()
    by_row, by_column = (yf[:, :2] + yf[:, 2:].flip(-1)).unbind(1)
    by_column = by_column.unflatten(2, (width, height)).transpose(2, 3).flatten(2)
    return (by_row + by_column).transpose(1, 2).unflatten(1, (height, width)).to(y.dtype)
