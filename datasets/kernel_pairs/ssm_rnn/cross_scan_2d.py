"""VMamba's cross scan: an image as four sequences, by rows and by columns, each in both directions.

out[0, h W + w] = out[1, w H + h] = out[2, L - 1 - h W - w] = out[3, L - 1 - w H - h] = x[h, w],    L = H W
dx[h, w] is the sum of the four cotangents that its copies got. A program owns a tile of the image in both directions:
the backward gathers, so nothing is added through memory. Two of the sequences have w side by side, two have h; a tile
of 32 by 32 is read in full sectors either way and turned in shared memory.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "cross_scan_2d",
    "family": "ssm_rnn",
    "op": "cross_scan",
    "schema": 1,
    "techniques": ("gather-form", "inverse-map", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _image_tile(tiles_w, H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Rows and columns of the program's tile, and their place in the sequences by rows and by columns."""
    h = (tl.program_id(1) // tiles_w) * BLOCK_H + tl.arange(0, BLOCK_H)
    w = (tl.program_id(1) % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (h[:, None] < H) & (w[None, :] < W)
    return h[:, None] * W + w[None, :], w[None, :] * H + h[:, None], inside


@triton.jit
def _cross_scan_fwd(X, OUT, C, H, W, tiles_w, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    L = H * W
    by_row, by_column, inside = _image_tile(tiles_w, H, W, BLOCK_H, BLOCK_W)
    x = tl.load(X + plane * L + by_row, mask=inside, other=0.0)
    # Planes of x are (batch, channel), those of out (batch, direction, channel).
    out = OUT + (plane // C * 4 * C + plane % C) * L
    tl.store(out + by_row, x, mask=inside)
    tl.store(out + 2 * C * L + (L - 1 - by_row), x, mask=inside)
    tl.store(out + C * L + by_column, x, mask=inside)
    tl.store(out + 3 * C * L + (L - 1 - by_column), x, mask=inside)


def _grid(planes, H, W):
    side_h, side_w = (max(8, min(32, triton.next_power_of_2(size))) for size in (H, W))
    tiles_w = triton.cdiv(W, side_w)
    return (planes, triton.cdiv(H, side_h) * tiles_w), tiles_w, {"BLOCK_H": side_h, "BLOCK_W": side_w}


def forward(x):
    # x (B, C, H, W), out (B, 4, C, H W).
    x = x.contiguous()
    B, C, H, W = x.shape
    out = torch.empty(B, 4, C, H * W, device=x.device, dtype=x.dtype)
    grid, tiles_w, tile = _grid(B * C, H, W)
    _cross_scan_fwd[grid](x, out, C, H, W, tiles_w, **tile, num_warps=4)
    return out, (x,)


# --- backward ---
@triton.jit
def _cross_scan_bwd(DOut, DX, C, H, W, tiles_w, do_b, do_k, do_c, do_l, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    by_row, by_column, inside = _image_tile(tiles_w, H, W, BLOCK_H, BLOCK_W)
    last = H * W - 1
    source = DOut + plane // C * do_b + plane % C * do_c
    direction = tl.cast(do_k, tl.int64)
    ahead = tl.load(source + by_row.to(tl.int64) * do_l, mask=inside, other=0.0).to(tl.float32)
    back = tl.load(source + 2 * direction + (last - by_row).to(tl.int64) * do_l, mask=inside, other=0.0)
    down = tl.load(source + direction + by_column.to(tl.int64) * do_l, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + 3 * direction + (last - by_column).to(tl.int64) * do_l, mask=inside, other=0.0)
    dx = (ahead + back.to(tl.float32)) + (down + up.to(tl.float32))
    tl.store(DX + plane * H * W + by_row, dx, mask=inside)


def backward(saved, grad_out, needs=None):
    (x,) = saved
    B, C, H, W = x.shape
    dx = torch.empty_like(x)
    grid, tiles_w, tile = _grid(B * C, H, W)
    _cross_scan_bwd[grid](grad_out, dx, C, H, W, tiles_w, *grad_out.stride(), **tile, num_warps=4)
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "C": 3, "H": 8, "W": 16},
    {"B": 1, "C": 2, "H": 37, "W": 19, "dtype": "float16"},
    {"B": 2, "C": 2, "H": 5, "W": 12, "dtype": "bfloat16"},
)
BENCH = ({"B": 32, "C": 192, "H": 64, "W": 64, "dtype": "bfloat16"},)


def make_args(B, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    two = torch.stack((x.flatten(2), x.transpose(2, 3).flatten(2)), 1)
    return torch.cat((two, two.flip(-1)), 1)
