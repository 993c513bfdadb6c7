"""Isotropic total variation per image: each pixel gathers what it adds to three gradient norms, rebuilt in its halo.

loss[b] = mean over pixels of sqrt(u^2 + v^2 + eps), u and v the differences to the pixel on the right and below, zero
at the last column and row. A pixel takes part in its own norm and in those of its left and upper neighbours: the
adjoint of forward differences. A program walks down a strip with a row's three pixels and its upper neighbour's term in
registers, so that three shifted reads of x a row, which the cache serves, replace any saved map.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "total_variation_2d",
    "family": "pool_vision",
    "op": "total_variation",
    "schema": 1,
    "techniques": ("gather-form", "halo", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pixel(X, at, there):
    return tl.load(X + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _variation_fwd(X, Parts, H, W, eps, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    down = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64) * H * W
    h = (tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    w = (tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    inside = (h < H) & (w < W)
    at = plane + h * W + w
    x = _pixel(X, at, inside)
    u = tl.where(w + 1 < W, _pixel(X, at + 1, (h < H) & (w + 1 < W)) - x, 0.0)
    v = tl.where(h + 1 < H, _pixel(X, at + W, (h + 1 < H) & (w < W)) - x, 0.0)
    total = tl.sum(tl.where(inside, tl.sqrt(u * u + v * v + eps), 0.0))
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), total)


def _patch(H, W):
    BLOCK_W = min(128, triton.next_power_of_2(W))
    return {"BLOCK_H": min(1024 // BLOCK_W, triton.next_power_of_2(H)), "BLOCK_W": BLOCK_W, "num_warps": 4}


def forward(x, eps=1e-6):
    x = x.contiguous()
    B, C, H, W = x.shape
    patch = _patch(H, W)
    grid = (B * C * triton.cdiv(H, patch["BLOCK_H"]), triton.cdiv(W, patch["BLOCK_W"]))
    parts = torch.empty(B, grid[0] // B * grid[1], device=x.device, dtype=torch.float32)
    _variation_fwd[grid](x, parts, H, W, eps, **patch)
    return parts.sum(1) / (C * H * W), (x, eps)


# --- backward ---
@triton.jit
def _variation_bwd(DLoss, X, DX, C, H, W, eps, dloss_stride, STRIP: tl.constexpr, BLOCK_W: tl.constexpr):
    strips = tl.cdiv(H, STRIP)
    plane = (tl.program_id(0) // strips).to(tl.int64)
    top = tl.program_id(0) % strips * STRIP
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    has_here = w < W
    has_left = has_here & (w > 0)
    has_right = w + 1 < W
    X += plane * H * W
    DX += plane * H * W
    scale = tl.load(DLoss + plane // C * dloss_stride).to(tl.float32) / (tl.cast(C, tl.float32) * H * W)
    at = top * W + w
    x = _pixel(X, at, has_here)
    left = _pixel(X, at - 1, has_left)
    right = _pixel(X, at + 1, has_right)
    # What the row above the strip sends down.
    upper = _pixel(X, at - W, has_here & (top > 0))
    upper_u = tl.where(has_right, _pixel(X, at - W + 1, has_right & (top > 0)) - upper, 0.0)
    upper_v = tl.where(top > 0, x - upper, 0.0)
    falling = upper_v * tl.rsqrt(upper_u * upper_u + upper_v * upper_v + eps)
    # Down the strip: a row's lower neighbours are the next row itself, and its own vertical term falls to that row.
    for h in tl.range(top, tl.minimum(top + STRIP, H), num_stages=3):
        has_lower = h + 1 < H
        at = h * W + w
        lower = _pixel(X, at + W, has_here & has_lower)
        lower_left = _pixel(X, at + W - 1, has_left & has_lower)
        lower_right = _pixel(X, at + W + 1, has_right & has_lower)
        u = tl.where(has_right, right - x, 0.0)
        v = tl.where(has_lower, lower - x, 0.0)
        # The left neighbour's difference to the right ends here; downwards it has one of its own.
        left_u = tl.where(has_left, x - left, 0.0)
        left_v = tl.where(has_left & has_lower, lower_left - left, 0.0)
        share = tl.rsqrt(u * u + v * v + eps)
        dx = falling + left_u * tl.rsqrt(left_u * left_u + left_v * left_v + eps) - (u + v) * share
        tl.store(DX + at, dx * scale, mask=has_here)
        falling = v * share
        x = lower
        left = lower_left
        right = lower_right


def backward(saved, grad_loss, needs=None):
    x, eps = saved
    B, C, H, W = x.shape
    dx = torch.empty_like(x)
    # Strips of 32 rows: one row in 32 is read twice.
    STRIP, BLOCK_W = 32, max(32, min(512, triton.next_power_of_2(W)))
    _variation_bwd[(B * C * triton.cdiv(H, STRIP), triton.cdiv(W, BLOCK_W))](
        grad_loss,
        x,
        dx,
        C,
        H,
        W,
        eps,
        grad_loss.stride(0),
        STRIP=STRIP,
        BLOCK_W=BLOCK_W,
        num_warps=max(1, BLOCK_W // 128),
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "C": 1, "H": 16, "W": 32},
    {"B": 2, "C": 3, "H": 11, "W": 149},
    {"B": 1, "C": 2, "H": 8, "W": 1, "dtype": "bfloat16"},
    {"B": 3, "C": 1, "H": 1, "W": 6, "dtype": "float16"},
)
BENCH = ({"B": 64, "C": 3, "H": 512, "W": 512, "dtype": "float32"},)


def make_args(B, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x, eps=1e-6):
    x = x.float()
    u = torch.nn.functional.pad(x[..., :, 1:] - x[..., :, :-1], (0, 1))
    v = torch.nn.functional.pad(x[..., 1:, :] - x[..., :-1, :], (0, 0, 0, 1))
    return (u * u + v * v + eps).sqrt().mean((1, 2, 3))
