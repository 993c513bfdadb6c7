"""Overlapping 2-D average pooling, padding counted or not: each pixel sums the cotangents of the windows over it."""

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
def _window_share(oh, ow, H, W, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, COUNT_PAD: tl.constexpr):
    """1 / (number of elements that the window at (oh, ow) averages over)."""
    if COUNT_PAD:
        rows = tl.minimum(oh * STRIDE - PAD + K, H + PAD) - (oh * STRIDE - PAD)
        cols = tl.minimum(ow * STRIDE - PAD + K, W + PAD) - (ow * STRIDE - PAD)
    else:
        rows = tl.minimum(oh * STRIDE - PAD + K, H) - tl.maximum(oh * STRIDE - PAD, 0)
        cols = tl.minimum(ow * STRIDE - PAD + K, W) - tl.maximum(ow * STRIDE - PAD, 0)
    # Lanes beyond the last window may count nothing; their value is never used.
    return 1.0 / tl.maximum(rows * cols, 1).to(tl.float32)


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
    share = _window_share(oh, ow, H, W, K, STRIDE, PAD, COUNT_PAD)
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
    REACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = i // W
    w = i % W
    # At most REACH = ceil(K / STRIDE) windows cover a pixel along each axis; counted back from the last that starts
    # at or before it.
    last_h = (h + PAD) // STRIDE
    last_w = (w + PAD) // STRIDE
    dy_plane = DY + (plane // C) * dy_b + (plane % C) * dy_c
    acc = tl.zeros((BLOCK,), tl.float32)
    for back_h in tl.static_range(REACH):
        for back_w in tl.static_range(REACH):
            oh = last_h - back_h
            ow = last_w - back_w
            covers = (oh >= 0) & (oh < HO) & (oh * STRIDE - PAD + K > h) & (i < H * W)
            covers = covers & (ow >= 0) & (ow < WO) & (ow * STRIDE - PAD + K > w)
            dy = tl.load(dy_plane + oh * dy_h + ow * dy_w, mask=covers, other=0.0).to(tl.float32)
            acc += dy * _window_share(oh, ow, H, W, K, STRIDE, PAD, COUNT_PAD)
    tl.store(DX + plane * H * W + i, acc, mask=i < H * W)


def backward(saved, grad_y, needs=None):
    H, W, kernel, stride, pad, count_pad = saved
    B, C, HO, WO = grad_y.shape
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    _avgpool_bwd[(B * C, triton.cdiv(H * W, 1024))](
        grad_y, dx, C, H, W, HO, WO, *grad_y.stride(),
        K=kernel, STRIDE=stride, PAD=pad, COUNT_PAD=count_pad, REACH=triton.cdiv(kernel, stride), BLOCK=1024,
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
