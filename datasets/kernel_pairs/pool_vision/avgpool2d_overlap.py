"""Overlapping 2-D average pooling, padding counted or not: each pixel sums the cotangents of the windows over it.

In the backward a lane owns as many pixels as a window's step has, which share the windows they lie in.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "avgpool2d_overlap",
    "family": "pool_vision",
    "op": "avg_pool2d",
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
def _axis_share(o, size, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, COUNT_PAD: tl.constexpr):
    """1 / (number of elements that window `o` averages over along one axis)."""
    if COUNT_PAD:
        count = tl.minimum(o * STRIDE - PAD + K, size + PAD) - (o * STRIDE - PAD)
    else:
        count = tl.minimum(o * STRIDE - PAD + K, size) - tl.maximum(o * STRIDE - PAD, 0)
    # Lanes beyond the last window may count nothing; their value is never used.
    return 1.0 / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def _avgpool_fwd(
    X, Y, H, W, HO, WO,
    K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    oh = o // WO
    ow = o % WO
    total = tl.zeros((BLOCK,), tl.float32)
    for kh in tl.static_range(K):
        for kw in tl.static_range(K):
            h = oh * STRIDE - PAD + kh
            w = ow * STRIDE - PAD + kw
            inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (o < HO * WO)
            total += tl.load(X + plane * H * W + h * W + w, mask=inside, other=0.0).to(tl.float32)
    share = _axis_share(oh, H, K, STRIDE, PAD, COUNT_PAD) * _axis_share(ow, W, K, STRIDE, PAD, COUNT_PAD)
    tl.store(Y + plane * HO * WO + o, total * share, mask=o < HO * WO)


def forward(x, kernel, stride, pad, count_pad=True):
    x = x.contiguous()
    B, C, H, W = x.shape
    HO, WO = (H + 2 * pad - kernel) // stride + 1, (W + 2 * pad - kernel) // stride + 1
    y = torch.empty(B, C, HO, WO, device=x.device, dtype=x.dtype)
    _avgpool_fwd[(B * C, triton.cdiv(HO * WO, 1024))](
        x, y, H, W, HO, WO, K=kernel, STRIDE=stride, PAD=pad, COUNT_PAD=count_pad, BLOCK=1024
    )
    return y, (H, W, kernel, stride, pad, count_pad)


# --- backward ---
@triton.jit
def _avgpool_bwd(
    DY, DX, C, H, W, HO, WO, dy_b, dy_c, dy_h, dy_w,
    K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, COUNT_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    # A lane owns a cell of STRIDE x STRIDE pixels. Pixel r of cell a lies in the windows a + i for the same few i in
    # all cells, known when this is compiled: a window is read once for all of a cell's pixels.
    plane = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    b = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    dy_plane = DY + (plane // C) * dy_b + (plane % C) * dy_c
    pixels = ()
    for r in tl.static_range(STRIDE):
        for c in tl.static_range(STRIDE):
            dx = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
            for i in tl.static_range(-((K - 1 - PAD - r) // STRIDE), (r + PAD) // STRIDE + 1):
                for j in tl.static_range(-((K - 1 - PAD - c) // STRIDE), (c + PAD) // STRIDE + 1):
                    oh = a + i
                    ow = b + j
                    there = (oh >= 0) & (oh < HO) & (ow >= 0) & (ow < WO)
                    at = oh.to(tl.int64) * dy_h + ow.to(tl.int64) * dy_w
                    # Equal loads of different pixels are merged by the compiler, as no store lies between them.
                    dy = tl.load(dy_plane + at, mask=there, other=0.0).to(tl.float32)
                    share = _axis_share(oh, H, K, STRIDE, PAD, COUNT_PAD)
                    dx += dy * share * _axis_share(ow, W, K, STRIDE, PAD, COUNT_PAD)
            pixels += (dx,)
    for r in tl.static_range(STRIDE):
        h = a * STRIDE + r
        row = DX + plane * H * W + h * W
        if STRIDE == 2:
            # Side by side in one store: halves of sectors would be written twice.
            w = (b * 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
            pair = tl.join(pixels[2 * r], pixels[2 * r + 1])
            tl.store(row[:, :, None] + w, pair, mask=(h < H)[:, :, None] & (w < W))
        else:
            for c in tl.static_range(STRIDE):
                w = b * STRIDE + c
                tl.store(row + w, pixels[r * STRIDE + c], mask=(h < H) & (w < W))


def backward(saved, grad_y, needs=None):
    H, W, kernel, stride, pad, count_pad = saved
    B, C, HO, WO = grad_y.shape
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    down, across = triton.cdiv(H, stride), triton.cdiv(W, stride)
    BLOCK_W = min(64, triton.next_power_of_2(across))
    BLOCK_H = min(256 // BLOCK_W, triton.next_power_of_2(down))
    _avgpool_bwd[(B * C, triton.cdiv(down, BLOCK_H), triton.cdiv(across, BLOCK_W))](
        grad_y, dx, C, H, W, HO, WO, *grad_y.stride(),
        K=kernel, STRIDE=stride, PAD=pad, COUNT_PAD=count_pad, BLOCK_H=BLOCK_H, BLOCK_W=BLOCK_W, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 16, "W": 16, "kernel": 3, "stride": 2, "pad": 1, "count_pad": True},
    {"B": 2, "C": 1, "H": 13, "W": 17, "kernel": 3, "stride": 1, "pad": 1, "count_pad": False, "dtype": "float16"},
    {"B": 1, "C": 2, "H": 8, "W": 12, "kernel": 4, "stride": 3, "pad": 0, "count_pad": True, "dtype": "bfloat16"},
)
BENCH = (
    {"B": 32, "C": 64, "H": 112, "W": 112, "kernel": 3, "stride": 2, "pad": 1, "count_pad": True, "dtype": "float32"},
)


def make_args(B, C, H, W, kernel, stride, pad, count_pad, dtype="float32", device="cpu", seed=0):
    if kernel > min(H, W) + 2 * pad or pad > kernel // 2:
        raise ValueError("the window must fit into the padded image, and the padding into half a window")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, kernel, stride, pad, count_pad


def reference(x, kernel, stride, pad, count_pad=True):
    pool = torch.nn.functional.avg_pool2d(x.float(), kernel, stride, pad, count_include_pad=count_pad)
    return pool.to(x.dtype)
