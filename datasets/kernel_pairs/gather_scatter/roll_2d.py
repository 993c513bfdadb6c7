"""Cyclic shift of a channels-last image, as for shifted windows: the adjoint shifts back, both as gathers of pixels."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "roll_2d",
    "family": "gather_scatter",
    "op": "roll",
    "schema": 1,
    "techniques": ("inverse-map", "gather-form", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _roll_fwd(X, Y, pixels, H, W, C, shift_h, shift_w, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    # Shifts lie between 0 and the side: one conditional subtraction wraps an index.
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    h = p // W % H + H - shift_h
    w = p % W + W - shift_w
    h = tl.where(h >= H, h - H, h)
    w = tl.where(w >= W, w - W, w)
    source = (p // (H * W) * H + h) * W + w
    ok = (p[:, None] < pixels) & (c[None, :] < C)
    x = tl.load(X + source[:, None] * C + c[None, :], mask=ok)
    tl.store(Y + p[:, None] * C + c[None, :], x, mask=ok)


def _tile(C):
    BLOCK_C = min(256, triton.next_power_of_2(C))
    return 4096 // BLOCK_C, BLOCK_C


def forward(x, shift_h, shift_w):
    """x (B, H, W, C): pixel (h, w) moves to (h + shift_h, w + shift_w), around the borders."""
    x = x.contiguous()
    B, H, W, C = x.shape
    y = torch.empty_like(x)
    BLOCK_P, BLOCK_C = _tile(C)
    _roll_fwd[(triton.cdiv(B * H * W, BLOCK_P), triton.cdiv(C, BLOCK_C))](
        x, y, B * H * W, H, W, C, shift_h % H, shift_w % W, BLOCK_P=BLOCK_P, BLOCK_C=BLOCK_C, num_warps=4
    )
    return y, (shift_h, shift_w)


# --- backward ---
@triton.jit
def _unroll_bwd(
    DY, DX, H, W, C, shift_h, shift_w, dy_b, dy_h, dy_w, dy_c, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    # A program owns part of one image row, whose source row is one number: only columns wrap within it.
    line = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    h = (line % H + shift_h) % H
    wrapped = w + shift_w
    wrapped = tl.where(wrapped >= W, wrapped - W, wrapped).to(tl.int64)
    row = DY + line // H * dy_b + h * dy_h
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        ok = (w[:, None] < W) & (c[None, :] < C)
        dy = tl.load(row + wrapped[:, None] * dy_w + c[None, :].to(tl.int64) * dy_c, mask=ok)
        tl.store(DX + (line * W + w[:, None]) * C + c[None, :], dy, mask=ok)


def backward(saved, grad_y, needs=None):
    shift_h, shift_w = saved
    B, H, W, C = grad_y.shape
    dx = torch.empty(B, H, W, C, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_W, BLOCK_C = _tile(C)
    BLOCK_W = min(BLOCK_W, triton.next_power_of_2(W))
    _unroll_bwd[(B * H, triton.cdiv(W, BLOCK_W))](
        grad_y, dx, H, W, C, shift_h % H, shift_w % W, *grad_y.stride(), BLOCK_W=BLOCK_W, BLOCK_C=BLOCK_C, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "H": 8, "W": 8, "C": 32},
    {"B": 2, "H": 7, "W": 13, "C": 21},
    {"B": 1, "H": 5, "W": 6, "C": 300, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "H": 56, "W": 56, "C": 192, "dtype": "bfloat16"},)


def make_args(B, H, W, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, W, C, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, -3, 2


def reference(x, shift_h, shift_w):
    return x.roll((shift_h, shift_w), (1, 2))
