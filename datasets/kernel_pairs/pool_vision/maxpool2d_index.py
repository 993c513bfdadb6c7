"""Overlapping 2-D max pooling with saved winners: each pixel gathers from the windows over it, without atomics.

In the backward a lane owns as many pixels as a window's step has, which share the windows they lie in.
"""

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
    K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    # A lane owns a cell of STRIDE x STRIDE pixels. Pixel r of cell a lies in the windows a + i for the same few i in
    # all cells, and is the same tap of each: a window is read once for all of a cell's pixels, and taps are constants.
    plane = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    b = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    dy_plane = DY + (plane // C) * dy_b + (plane % C) * dy_c
    winners = Winner + plane * HO * WO
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
                    winner = tl.load(winners + oh * WO + ow, mask=there, other=-1)
                    dy = tl.load(dy_plane + at, mask=there, other=0.0).to(tl.float32)
                    tap = (r + PAD - i * STRIDE) * K + c + PAD - j * STRIDE
                    dx += tl.where(winner == tap, dy, 0.0)
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
    winner, H, W, kernel, stride, pad = saved
    B, C, HO, WO = winner.shape
    dx = torch.empty(B, C, H, W, device=grad_y.device, dtype=grad_y.dtype)
    down, across = triton.cdiv(H, stride), triton.cdiv(W, stride)
    BLOCK_W = min(64, triton.next_power_of_2(across))
    BLOCK_H = min(256 // BLOCK_W, triton.next_power_of_2(down))
    _maxpool_bwd[(B * C, triton.cdiv(down, BLOCK_H), triton.cdiv(across, BLOCK_W))](
        grad_y, winner, dx, C, H, W, HO, WO, *grad_y.stride(),
        K=kernel, STRIDE=stride, PAD=pad, BLOCK_H=BLOCK_H, BLOCK_W=BLOCK_W, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 16, "W": 16, "kernel": 3, "stride": 2, "pad": 1},
    {"B": 2, "C": 1, "H": 13, "W": 17, "kernel": 3, "stride": 1, "pad": 0, "dtype": "float16"},
    {"B": 1, "C": 2, "H": 8, "W": 12, "kernel": 2, "stride": 2, "pad": 0, "dtype": "bfloat16"},
)
BENCH = ({"B": 128, "C": 64, "H": 112, "W": 112, "kernel": 3, "stride": 2, "pad": 1, "dtype": "float32"},)


def make_args(B, C, H, W, kernel, stride, pad, dtype="float32", device="cpu", seed=0):
    if kernel > min(H, W) + 2 * pad or pad > kernel // 2:
        raise ValueError("the window must fit into the padded image, and the padding into half a window")
    g = torch.Generator().manual_seed(seed)
    # Distinct values that bf16 tells apart as far as it can; ties go to the first winner on both sides.
    x = torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, kernel, stride, pad


def reference(x, kernel, stride, pad):
    return torch.nn.functional.max_pool2d(x.float(), kernel, stride, pad).to(x.dtype)
