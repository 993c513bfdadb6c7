"""Overlapping 2-D max pooling with saved winners: each pixel gathers from the windows over it, without atomics."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "maxpool2d_index",
    "family": "pool_vision",
    "op": "max_pool2d",
    "schema": 1,
    "techniques": ("gather-form", "argmax-routing", "halo", "strided-cotangent"),
    "saves": ("winner: i8 (B, C, HO, WO)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _maxpool_fwd(
    X, Y, Winner, H, W, HO, WO, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr
):
    plane = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    oh = o // WO
    ow = o % WO
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    winner = tl.zeros((BLOCK,), tl.int32)
    for tap in tl.static_range(K * K):
        h = oh * STRIDE - PAD + tap // K
        w = ow * STRIDE - PAD + tap % K
        inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (o < HO * WO)
        x = tl.load(X + plane * H * W + h * W + w, mask=inside, other=-float("inf")).to(tl.float32)
        # Strictly greater: the first of equals wins, as everywhere else.
        better = x > best
        best = tl.where(better, x, best)
        winner = tl.where(better, tap, winner)
    tl.store(Y + plane * HO * WO + o, best, mask=o < HO * WO)
    # The tap's number within its window fits one byte; a position in the plane would need four or eight.
    tl.store(Winner + plane * HO * WO + o, winner.to(tl.int8), mask=o < HO * WO)


def forward(x, kernel, stride, pad):
    x = x.contiguous()
    B, C, H, W = x.shape
    HO, WO = (H + 2 * pad - kernel) // stride + 1, (W + 2 * pad - kernel) // stride + 1
    y = torch.empty(B, C, HO, WO, device=x.device, dtype=x.dtype)
    winner = torch.empty(B, C, HO, WO, device=x.device, dtype=torch.int8)
    grid = (B * C, triton.cdiv(HO * WO, 1024))
    _maxpool_fwd[grid](x, y, winner, H, W, HO, WO, K=kernel, STRIDE=stride, PAD=pad, BLOCK=1024)
    return y, (winner, H, W, kernel, stride, pad)


# --- backward ---
@triton.jit
def _maxpool_bwd(
    DY, Winner, DX, C, H, W, HO, WO, dy_b, dy_c, dy_h, dy_w,
    K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = i // W
    w = i % W
    dy_plane = DY + (plane // C) * dy_b + (plane % C) * dy_c
    acc = tl.zeros((BLOCK,), tl.float32)
    # Of all taps only REACH^2 = ceil(K / STRIDE)^2 belong to windows over this pixel; which ones follows from where the
    # windows begin, counted back from the last that begins at or before it.
    for back in tl.static_range(REACH * REACH):
        oh = (h + PAD) // STRIDE - back // REACH
        ow = (w + PAD) // STRIDE - back % REACH
        kh = h + PAD - oh * STRIDE
        kw = w + PAD - ow * STRIDE
        covers = (i < H * W) & (oh >= 0) & (oh < HO) & (kh < K) & (ow >= 0) & (ow < WO) & (kw < K)
        winner = tl.load(Winner + plane * HO * WO + oh * WO + ow, mask=covers, other=-1)
        dy = tl.load(dy_plane + oh * dy_h + ow * dy_w, mask=covers, other=0.0).to(tl.float32)
        acc += tl.where(winner == kh * K + kw, dy, 0.0)
    tl.store(DX + plane * H * W + i, acc, mask=i < H * W)


def backward(saved, grad_y, needs=None):
    winner, H, W, kernel, stride, pad = saved
    B, C, HO, WO = winner.shape
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    _maxpool_bwd[(B * C, triton.cdiv(H * W, 1024))](
        grad_y, winner, dx, C, H, W, HO, WO, *grad_y.stride(),
        K=kernel, STRIDE=stride, PAD=pad, REACH=triton.cdiv(kernel, stride), BLOCK=1024,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 16, "W": 16, "kernel": 3, "stride": 2, "pad": 1},
    {"B": 2, "C": 1, "H": 13, "W": 17, "kernel": 3, "stride": 1, "pad": 0, "dtype": "float16"},
    {"B": 1, "C": 2, "H": 8, "W": 12, "kernel": 2, "stride": 2, "pad": 0, "dtype": "bfloat16"},
)
BENCH = ({"B": 32, "C": 64, "H": 112, "W": 112, "kernel": 3, "stride": 2, "pad": 1, "dtype": "float32"},)


def make_args(B, C, H, W, kernel, stride, pad, dtype="float32", device="cpu", seed=0):
    if kernel > min(H, W) + 2 * pad or pad > kernel // 2:
        raise ValueError("the window must fit into the padded image, and the padding into half a window")
    g = torch.Generator().manual_seed(seed)
    # Distinct values that bf16 tells apart as far as it can; ties go to the first winner on both sides.
    x = torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, kernel, stride, pad


def reference(x, kernel, stride, pad):
    return torch.nn.functional.max_pool2d(x.float(), kernel, stride, pad).to(x.dtype)
