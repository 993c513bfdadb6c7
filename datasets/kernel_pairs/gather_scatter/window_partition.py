"""Image cut into square windows of tokens: a bijection, gathered by window on the way there, by pixel on the way back.

Both directions read and write whole channel vectors, and each writes in its own output's order, so that the stores,
which cannot be cached away, are the contiguous side.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "window_partition",
    "family": "gather_scatter",
    "op": "window_partition",
    "schema": 1,
    "techniques": ("inverse-map", "loop-swap", "gather-form", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _partition_fwd(X, Y, H, W, C, SIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    # One window a program: its place in the image is three scalars, its tokens are a tile.
    window = tl.program_id(0).to(tl.int64)
    across = W // SIDE
    left = window % across * SIDE
    top = window // across % (H // SIDE) * SIDE
    image = window // (across * (H // SIDE))
    t = tl.arange(0, BLOCK_T)
    pixel = (image * H + top + t // SIDE) * W + left + t % SIDE
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        ok = (t[:, None] < SIDE * SIDE) & (c[None, :] < C)
        x = tl.load(X + pixel[:, None] * C + c[None, :], mask=ok)
        tl.store(Y + (window * SIDE * SIDE + t[:, None]) * C + c[None, :], x, mask=ok)


def forward(x, side):
    """x (B, H, W, C) with H and W multiples of `side`; the result is (windows, side * side, C)."""
    x = x.contiguous()
    B, H, W, C = x.shape
    windows = B * (H // side) * (W // side)
    y = torch.empty(windows, side * side, C, device=x.device, dtype=x.dtype)
    BLOCK_T = triton.next_power_of_2(side * side)
    BLOCK_C = max(16, min(4096 // BLOCK_T, triton.next_power_of_2(C)))
    _partition_fwd[(windows,)](x, y, H, W, C, SIDE=side, BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=4)
    return y, (x.shape, side)


# --- backward ---
@triton.jit
def _merge_bwd(
    DY, DX, pixels, H, W, C, dy_w, dy_t, dy_c, SIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = p % W
    line = p // W
    # Heights are multiples of the side: bands of windows are counted across images without a break.
    window = line // SIDE * (W // SIDE) + w // SIDE
    token = line % SIDE * SIDE + w % SIDE
    ok = (p[:, None] < pixels) & (c[None, :] < C)
    at = (window * dy_w + token * dy_t)[:, None] + c[None, :].to(tl.int64) * dy_c
    tl.store(DX + p[:, None] * C + c[None, :], tl.load(DY + at, mask=ok), mask=ok)


def backward(saved, grad_y, needs=None):
    (B, H, W, C), side = saved
    dx = torch.empty(B, H, W, C, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_C = min(256, triton.next_power_of_2(C))
    BLOCK_P = 4096 // BLOCK_C
    _merge_bwd[(triton.cdiv(B * H * W, BLOCK_P), triton.cdiv(C, BLOCK_C))](
        grad_y, dx, B * H * W, H, W, C, *grad_y.stride(), SIDE=side, BLOCK_P=BLOCK_P, BLOCK_C=BLOCK_C, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "high": 2, "wide": 2, "side": 4, "C": 32},
    {"B": 2, "high": 1, "wide": 3, "side": 7, "C": 21},
    {"B": 1, "high": 3, "wide": 1, "side": 3, "C": 300, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "high": 8, "wide": 8, "side": 7, "C": 192, "dtype": "bfloat16"},)


def make_args(B, high, wide, side, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, high * side, wide * side, C, generator=g)
    return x.to(device=device, dtype=getattr(torch, dtype)), side


def reference(x, side):
    B, H, W, C = x.shape
    windows = x.view(B, H // side, side, W // side, side, C).transpose(2, 3)
    return windows.reshape(-1, side * side, C)
