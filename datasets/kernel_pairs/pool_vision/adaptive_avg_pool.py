"""Adaptive 2-D average pooling: bins of unequal size may overlap, each pixel sums the bins whose bounds contain it.

Bin o of an axis covers [floor(o H / HO), ceil((o + 1) H / HO)). Inverted: pixel h lies in bins floor(h HO / H) to
ceil((h + 1) HO / H) - 1. The backward's tile is (row, column) of a plane, so that the divisions for bounds are done
once for each row and each column instead of once for each pixel.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "adaptive_avg_pool",
    "family": "pool_vision",
    "op": "adaptive_avg_pool2d",
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
def _bin_start(o, size, bins):
    return o * size // bins


@triton.jit
def _bin_end(o, size, bins):
    return ((o + 1) * size + bins - 1) // bins


@triton.jit
def _adaptive_fwd(X, Y, H, W, HO, WO, MOST_H, COLS: tl.constexpr, BLOCK: tl.constexpr):
    # A tile is (bin, column of the bin): rows of a bin follow one another.
    plane = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = _bin_start(o // WO, H, HO)
    bottom = _bin_end(o // WO, H, HO)
    left = _bin_start(o % WO, W, WO)
    right = _bin_end(o % WO, W, WO)
    w = left[:, None] + tl.arange(0, COLS)[None, :]
    in_bin = (w < right[:, None]) & (o < HO * WO)[:, None]
    total = tl.zeros((BLOCK, COLS), tl.float32)
    for row in range(MOST_H):
        h = top + row
        x = tl.load(X + plane * H * W + h[:, None] * W + w, mask=in_bin & (h < bottom)[:, None], other=0.0)
        total += x.to(tl.float32)
    area = ((bottom - top) * (right - left)).to(tl.float32)
    tl.store(Y + plane * HO * WO + o, tl.sum(total, 1) / area, mask=o < HO * WO)


def forward(x, out_h, out_w):
    x = x.contiguous()
    B, C, H, W = x.shape
    y = torch.empty(B, C, out_h, out_w, device=x.device, dtype=x.dtype)
    # No bin has more rows or columns than this.
    most_h, most_w = (triton.cdiv(size, bins) + 1 for size, bins in ((H, out_h), (W, out_w)))
    COLS = triton.next_power_of_2(most_w)
    BLOCK = max(1, min(1024 // COLS, triton.next_power_of_2(out_h * out_w)))
    _adaptive_fwd[(B * C, triton.cdiv(out_h * out_w, BLOCK))](
        x, y, H, W, out_h, out_w, most_h, COLS=COLS, BLOCK=BLOCK, num_warps=4
    )
    return y, (H, W, out_h, out_w)


# --- backward ---
@triton.jit
def _adaptive_bwd(
    DY, DX, C, H, W, HO, WO, dy_b, dy_c, dy_h, dy_w,
    REACH_H: tl.constexpr, REACH_W: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    w = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    source = DY + (plane // C) * dy_b + (plane % C) * dy_c
    dx = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in tl.static_range(REACH_H):
        oh = h * HO // H + i
        # A bin belongs to the pixel if it has begun; that it has not ended is the first bin's property.
        top = _bin_start(oh, H, HO)
        row_ok = (oh < HO) & (top <= h) & (h < H)
        row_share = 1.0 / (_bin_end(oh, H, HO) - top).to(tl.float32)
        for j in tl.static_range(REACH_W):
            ow = w * WO // W + j
            left = _bin_start(ow, W, WO)
            col_ok = (ow < WO) & (left <= w) & (w < W)
            col_share = 1.0 / (_bin_end(ow, W, WO) - left).to(tl.float32)
            at = oh.to(tl.int64)[:, None] * dy_h + ow.to(tl.int64)[None, :] * dy_w
            dy = tl.load(source + at, mask=row_ok[:, None] & col_ok[None, :], other=0.0).to(tl.float32)
            dx += dy * (row_share[:, None] * col_share[None, :])
    inside = (h[:, None] < H) & (w[None, :] < W)
    tl.store(DX + (plane * H + h[:, None]) * W + w[None, :], dx, mask=inside)


def backward(saved, grad_y, needs=None):
    H, W, out_h, out_w = saved
    B, C = grad_y.shape[:2]
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    # With no more bins than pixels a pixel lies in two bins at most, and in one if the division is even.
    reach_h, reach_w = (
        triton.cdiv(bins, size) + (max(size, bins) % min(size, bins) != 0) for size, bins in ((H, out_h), (W, out_w))
    )
    BLOCK_W = min(128, triton.next_power_of_2(W))
    BLOCK_H = min(1024 // BLOCK_W, triton.next_power_of_2(H))
    _adaptive_bwd[(B * C, triton.cdiv(H, BLOCK_H), triton.cdiv(W, BLOCK_W))](
        grad_y, dx, C, H, W, out_h, out_w, *grad_y.stride(),
        REACH_H=reach_h, REACH_W=reach_w, BLOCK_H=BLOCK_H, BLOCK_W=BLOCK_W, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 16, "W": 32, "out_h": 4, "out_w": 8},
    {"B": 2, "C": 1, "H": 13, "W": 22, "out_h": 5, "out_w": 7},
    {"B": 1, "C": 1, "H": 6, "W": 9, "out_h": 10, "out_w": 23, "dtype": "bfloat16"},
    {"B": 1, "C": 2, "H": 9, "W": 20, "out_h": 1, "out_w": 3, "dtype": "float16"},
)
BENCH = ({"B": 64, "C": 256, "H": 50, "W": 50, "out_h": 7, "out_w": 7, "dtype": "float32"},)


def make_args(B, C, H, W, out_h, out_w, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, out_h, out_w


def reference(x, out_h, out_w):
    return torch.nn.functional.adaptive_avg_pool2d(x.float(), (out_h, out_w)).to(x.dtype)
