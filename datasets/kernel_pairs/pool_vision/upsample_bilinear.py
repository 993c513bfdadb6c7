"""Bilinear resizing to any size: the adjoint gathers, over the outputs that a pixel supports, its weight at each.

Along an axis output o lies at s(o) = (o + 1/2) H / HO - 1/2, clamped to the image, and pixel h has the weight max(0, 1
- |s(o) - h|) there: the tent holds at the clamped borders, too. Weights of rows and columns multiply, so a tile of dx
computes them once for its rows and once for its columns, over the range of o that can reach it. No indices are kept,
and growing and shrinking are the same code.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "upsample_bilinear",
    "family": "pool_vision",
    "op": "upsample_bilinear2d",
    "schema": 1,
    "techniques": ("gather-form", "halo", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _source(o, size, outputs):
    """Where output o of `outputs` lies in an axis of `size` pixels."""
    at = (o.to(tl.float32) + 0.5) * (tl.cast(size, tl.float32) / tl.cast(outputs, tl.float32)) - 0.5
    return tl.minimum(tl.maximum(at, 0.0), tl.cast(size, tl.float32) - 1.0)


@triton.jit
def _bilinear_fwd(X, Y, H, W, HO, WO, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    down = tl.cdiv(HO, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64)
    oh = tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H)
    ow = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (oh[:, None] < HO) & (ow[None, :] < WO)
    h = _source(oh, H, HO)
    w = _source(ow, W, WO)
    top = tl.floor(h).to(tl.int32)
    left = tl.floor(w).to(tl.int32)
    low_share = (h - top.to(tl.float32))[:, None]
    right_share = (w - left.to(tl.float32))[None, :]
    low = tl.minimum(top + 1, H - 1)
    right = tl.minimum(left + 1, W - 1)
    X += plane * H * W
    x = tl.load(X + top[:, None] * W + left[None, :], mask=inside, other=0.0).to(tl.float32)
    x_right = tl.load(X + top[:, None] * W + right[None, :], mask=inside, other=0.0).to(tl.float32)
    upper = x + right_share * (x_right - x)
    x = tl.load(X + low[:, None] * W + left[None, :], mask=inside, other=0.0).to(tl.float32)
    x_right = tl.load(X + low[:, None] * W + right[None, :], mask=inside, other=0.0).to(tl.float32)
    lower = x + right_share * (x_right - x)
    y_at = Y + (plane * HO + oh[:, None]) * WO + ow[None, :]
    tl.store(y_at, upper + low_share * (lower - upper), mask=inside)


def _patch(H, W):
    BLOCK_W = min(64, triton.next_power_of_2(W))
    return {"BLOCK_H": min(1024 // BLOCK_W, triton.next_power_of_2(H)), "BLOCK_W": BLOCK_W}


def forward(x, out_h, out_w):
    x = x.contiguous()
    B, C, H, W = x.shape
    y = torch.empty(B, C, out_h, out_w, device=x.device, dtype=x.dtype)
    patch = _patch(out_h, out_w)
    grid = (B * C * triton.cdiv(out_h, patch["BLOCK_H"]), triton.cdiv(out_w, patch["BLOCK_W"]))
    _bilinear_fwd[grid](x, y, H, W, out_h, out_w, **patch, num_warps=4)
    return y, (H, W)


# --- backward ---
@triton.jit
def _first_reached(i, size, outputs):
    """An output not behind the first that pixel i supports; rounding may make it one early, which weighs nothing."""
    return tl.floor((i.to(tl.float32) - 0.5) * (tl.cast(outputs, tl.float32) / tl.cast(size, tl.float32)) - 0.5)


@triton.jit
def _weight(o, i, size, outputs):
    """Weight of pixel i in output o, zero for outputs that do not exist."""
    tent = tl.maximum(1.0 - tl.abs(_source(o, size, outputs) - i.to(tl.float32)), 0.0)
    return tl.where((o >= 0) & (o < outputs), tent, 0.0)


@triton.jit
def _bilinear_bwd(
    DY, DX, C, H, W, HO, WO, dy_b, dy_c, dy_h, dy_w,
    REACH_H: tl.constexpr, REACH_W: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64)
    h = tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    DY += plane // C * dy_b + plane % C * dy_c
    first_h = _first_reached(h, H, HO).to(tl.int32)
    first_w = _first_reached(w, W, WO).to(tl.int32)
    dx = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(REACH_H):
        oh = first_h + i
        row_weight = _weight(oh, h, H, HO)
        row = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
        for j in tl.static_range(REACH_W):
            ow = first_w + j
            col_weight = _weight(ow, w, W, WO)
            # Reading by existence, not by weight, keeps the mask free of comparisons of data.
            there = ((oh >= 0) & (oh < HO))[:, None] & ((ow >= 0) & (ow < WO))[None, :]
            at = oh.to(tl.int64)[:, None] * dy_h + ow.to(tl.int64)[None, :] * dy_w
            row += col_weight[None, :] * tl.load(DY + at, mask=there, other=0.0).to(tl.float32)
        dx += row_weight[:, None] * row
    tl.store(DX + (plane * H + h[:, None]) * W + w[None, :], dx, mask=(h[:, None] < H) & (w[None, :] < W))


def backward(saved, grad_y, needs=None):
    H, W = saved
    B, C, HO, WO = grad_y.shape
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    patch = _patch(H, W)
    # Outputs over two pixels' width, and one for the fraction at which they begin.
    reach_h, reach_w = (triton.cdiv(2 * outputs, size) + 1 for size, outputs in ((H, HO), (W, WO)))
    _bilinear_bwd[(B * C * triton.cdiv(H, patch["BLOCK_H"]), triton.cdiv(W, patch["BLOCK_W"]))](
        grad_y, dx, C, H, W, HO, WO, *grad_y.stride(), REACH_H=reach_h, REACH_W=reach_w, **patch, num_warps=8
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 8, "W": 16, "out_h": 16, "out_w": 32},
    {"B": 2, "C": 1, "H": 9, "W": 19, "out_h": 23, "out_w": 27},
    {"B": 1, "C": 1, "H": 14, "W": 9, "out_h": 5, "out_w": 31, "dtype": "bfloat16"},
    {"B": 1, "C": 2, "H": 3, "W": 12, "out_h": 12, "out_w": 1, "dtype": "float16"},
)
BENCH = ({"B": 16, "C": 128, "H": 64, "W": 64, "out_h": 128, "out_w": 128, "dtype": "bfloat16"},)


def make_args(B, C, H, W, out_h, out_w, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, out_h, out_w


def reference(x, out_h, out_w):
    return torch.nn.functional.interpolate(x, size=(out_h, out_w), mode="bilinear", align_corners=False)
