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
def _covering(i, place, size, bins):
    """Number, share and existence of the i-th bin over the pixels `place` of one axis."""
    o = place * bins // size + i
    # A bin belongs to the pixel if it has begun; that it has not ended is the first bin's property.
    start = _bin_start(o, size, bins)
    share = 1.0 / (_bin_end(o, size, bins) - start).to(tl.float32)
    return o.to(tl.int64), share, (o < bins) & (start <= place) & (place < size)


@triton.jit
def _adaptive_bwd(
    DY, DX, planes, C, dy_b, dy_c, dy_h, dy_w,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    REACH_H: tl.constexpr, REACH_W: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The same pixels of PLANES planes: all divisions stand before the loop, and a plane costs a pixel its loads, its
    # products and a store. A network sees one image size: as constants, sizes divide by multiplying, and a plane's
    # beginning is known to lie at a whole word.
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = pixel // W
    w = pixel % W
    offsets = ()
    shares = ()
    for i in tl.static_range(REACH_H):
        oh, row_share, row_ok = _covering(i, h, H, HO)
        for j in tl.static_range(REACH_W):
            ow, col_share, col_ok = _covering(j, w, W, WO)
            offsets += (oh * dy_h + ow * dy_w,)
            # No bin's share is zero: zero stands for a bin that the pixel does not lie in.
            shares += (tl.where(row_ok & col_ok, row_share * col_share, 0.0),)
    first = tl.program_id(0) * PLANES
    b = (first // C).to(tl.int64)
    c = (first % C).to(tl.int64)
    for plane in range(first, tl.minimum(first + PLANES, planes)):
        source = DY + b * dy_b + c * dy_c
        last = c + 1 == C
        b = tl.where(last, b + 1, b)
        c = tl.where(last, 0, c + 1)
        dx = tl.zeros((BLOCK,), tl.float32)
        for bin in tl.static_range(REACH_H * REACH_W):
            dy = tl.load(source + offsets[bin], mask=shares[bin] > 0.0, other=0.0).to(tl.float32)
            dx += dy * shares[bin]
        tl.store(DX + tl.cast(plane, tl.int64) * H * W + pixel, dx, mask=pixel < H * W)


def backward(saved, grad_y, needs=None):
    H, W, out_h, out_w = saved
    B, C = grad_y.shape[:2]
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    # With no more bins than pixels a pixel lies in two bins at most, and in one if the division is even.
    reach_h, reach_w = (
        triton.cdiv(bins, size) + (max(size, bins) % min(size, bins) != 0) for size, bins in ((H, out_h), (W, out_w))
    )
    PLANES = 16 if B * C >= 4096 else 1
    _adaptive_bwd[(triton.cdiv(B * C, PLANES), triton.cdiv(H * W, 512))](
        grad_y, dx, B * C, C, *grad_y.stride(), H=H, W=W, HO=out_h, WO=out_w,
        REACH_H=reach_h, REACH_W=reach_w, PLANES=PLANES, BLOCK=512, num_warps=4,
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
