"""Pixel shuffle: r * r channels become an r times finer image; tiles (pixel, channel) make both sides contiguous.

A row of the fine image interleaves the rows of r planes. A tile of pixels by planes is read plane by plane and written
as one stretch; the adjoint is the same permutation read backwards, with the cotangent's strides on the fine side.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "pixel_shuffle",
    "family": "gather_scatter",
    "op": "pixel_shuffle",
    "schema": 1,
    "techniques": ("inverse-map", "orthogonal-adjoint", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _shuffle_fwd(X, Y, H, W, R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr):
    # One row of the fine image: its r planes are neighbours among the channels.
    line = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)[:, None]
    j = tl.arange(0, BLOCK_R)[None, :]
    ok = (w < W) & (j < R)
    channel = line // (H * R)
    h = line // R % H
    i = line % R
    x = tl.load(X + ((channel * R * R + i * R + j) * H + h) * W + w, mask=ok)
    tl.store(Y + line * W * R + w * R + j, x, mask=ok)


def forward(x, r):
    """x (B, C r r, H, W); the result is (B, C, H r, W r)."""
    x = x.contiguous()
    B, CRR, H, W = x.shape
    C = CRR // (r * r)
    y = torch.empty(B, C, H * r, W * r, device=x.device, dtype=x.dtype)
    BLOCK_W = min(512, triton.next_power_of_2(W))
    _shuffle_fwd[(B * C * H * r, triton.cdiv(W, BLOCK_W))](
        x, y, H, W, R=r, BLOCK_W=BLOCK_W, BLOCK_R=triton.next_power_of_2(r), num_warps=max(1, min(4, BLOCK_W // 64))
    )
    return y, (r,)


# --- backward ---
@triton.jit
def _unshuffle_bwd(
    DY, DX, C, H, W, dy_b, dy_c, dy_h, dy_w, R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    # The r fine rows under one coarse row: r * r planes, row by row, each read once.
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)[:, None]
    j = tl.arange(0, BLOCK_R)[None, :]
    ok = (w < W) & (j < R)
    h = row % H
    plane = row // H
    fine = DY + plane // C * dy_b + plane % C * dy_c + (w * R + j).to(tl.int64) * dy_w
    coarse = DX + (plane * R * R * H + h) * W + w
    for i in tl.static_range(R):
        dy = tl.load(fine + (h * R + i) * dy_h, mask=ok)
        tl.store(coarse + (i * R + j).to(tl.int64) * H * W, dy, mask=ok)


def backward(saved, grad_y, needs=None):
    (r,) = saved
    B, C, height, width = grad_y.shape
    H, W = height // r, width // r
    dx = torch.empty(B, C * r * r, H, W, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_W = min(512, triton.next_power_of_2(W))
    _unshuffle_bwd[(B * C * H, triton.cdiv(W, BLOCK_W))](
        grad_y, dx, C, H, W, *grad_y.stride(), R=r, BLOCK_W=BLOCK_W, BLOCK_R=triton.next_power_of_2(r),
        num_warps=max(1, min(4, BLOCK_W // 64)),
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 4, "W": 32, "r": 2},
    {"B": 2, "C": 1, "H": 5, "W": 37, "r": 3},
    {"B": 1, "C": 3, "H": 2, "W": 20, "r": 4, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "C": 64, "H": 128, "W": 128, "r": 2, "dtype": "bfloat16"},)


def make_args(B, C, H, W, r, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, C * r * r, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)), r


def reference(x, r):
    return torch.nn.functional.pixel_shuffle(x, r)
