"""Reflection padding of images: backwards each pixel gathers from itself and from its mirror images in the padding.

Along one axis index i of the image stands at i + pad, and mirrored at pad - i near the front and at pad + 2 (n - 1) - i
near the back. Three places by three: corners fold four ways or more, inner pixels pay one load and eight masks.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "pad_reflect_2d",
    "family": "gather_scatter",
    "op": "reflection_pad2d",
    "schema": 1,
    "techniques": ("gather-form", "halo", "masking", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _mirror(i, n):
    """Index in 0 .. n - 1 of a place that lies up to n - 1 beyond either end."""
    i = tl.abs(i)
    return tl.where(i >= n, 2 * (n - 1) - i, i)


@triton.jit
def _pad_fwd(X, Y, H, W, PAD, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    wide = W + 2 * PAD
    size = (H + 2 * PAD) * wide
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = _mirror(o // wide - PAD, H)
    w = _mirror(o % wide - PAD, W)
    x = tl.load(X + plane * H * W + h * W + w, mask=o < size)
    tl.store(Y + plane * size + o, x, mask=o < size)


def forward(x, pad):
    """x (B, C, H, W) with `pad` smaller than both sides."""
    x = x.contiguous()
    B, C, H, W = x.shape
    y = torch.empty(B, C, H + 2 * pad, W + 2 * pad, device=x.device, dtype=x.dtype)
    size = (H + 2 * pad) * (W + 2 * pad)
    _pad_fwd[(B * C, triton.cdiv(size, 1024))](x, y, H, W, pad, BLOCK=1024, num_warps=4)
    return y, (pad,)


# --- backward ---
@triton.jit
def _copy_of(i, n, PAD, which: tl.constexpr):
    """Where the padded axis holds index i for the first, second and third time, and whether it does."""
    if which == 0:
        place = i + PAD
        there = i >= 0
    elif which == 1:
        place = PAD - i
        there = (i >= 1) & (i <= PAD)
    else:
        place = PAD + 2 * (n - 1) - i
        there = (i <= n - 2) & (i >= n - 1 - PAD)
    return place.to(tl.int64), there


@triton.jit
def _pad_bwd(DY, DX, C, H, W, PAD, dy_b, dy_c, dy_h, dy_w, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = p // W
    w = p % W
    source = DY + plane // C * dy_b + plane % C * dy_c
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(9):
        row, row_there = _copy_of(h, H, PAD, k // 3)
        column, column_there = _copy_of(w, W, PAD, k % 3)
        there = row_there & column_there & (p < H * W)
        total += tl.load(source + row * dy_h + column * dy_w, mask=there, other=0.0).to(tl.float32)
    tl.store(DX + plane * H * W + p, total, mask=p < H * W)


def backward(saved, grad_y, needs=None):
    (pad,) = saved
    B, C, height, width = grad_y.shape
    H, W = height - 2 * pad, width - 2 * pad
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    _pad_bwd[(B * C, triton.cdiv(H * W, 1024))](
        grad_y, dx, C, H, W, pad, *grad_y.stride(), BLOCK=1024, num_warps=4
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 8, "W": 16, "pad": 1},
    {"B": 2, "C": 1, "H": 7, "W": 37, "pad": 6},
    {"B": 1, "C": 3, "H": 9, "W": 20, "pad": 3, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "C": 64, "H": 256, "W": 256, "pad": 3, "dtype": "bfloat16"},)


def make_args(B, C, H, W, pad, dtype="float32", device="cpu", seed=0):
    if pad >= min(H, W):
        raise ValueError("the padding is smaller than the image")
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)), pad


def reference(x, pad):
    return torch.nn.functional.pad(x, (pad, pad, pad, pad), mode="reflect")
