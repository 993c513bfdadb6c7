"""Separable Gaussian blur with a learned sigma: two adjoint passes, each of which also yields its share of dsigma.

y = V R x, R along rows and V down columns, with taps k_i = exp(-i^2 / 2 sigma^2) / Z and zeros outside the image. Both
are their own adjoint. dsigma = <dy, V' R x> + <V dy, R' x>, V' and R' with the taps' derivatives
k_i (i^2 - sum k i^2) / sigma^3; moved over to the other side, V' meets dy in the loop where V does, so that each pass
reads a window once for two sums, and needs of R x the own pixel alone, which is blurred again. A tiny launch of the
forward writes both rows of taps.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gaussian_blur_separable",
    "family": "pool_vision",
    "op": "gaussian_blur",
    "schema": 1,
    "techniques": ("halo", "recompute", "scalar-gradient", "two-stage-partials", "strided-cotangent"),
    "saves": ("taps: fp32 (2, SIDE)",),
    "grads": ("x", "sigma"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gaussian_taps(Sigma, Taps, SIDE: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    square = ((lane - SIDE // 2) * (lane - SIDE // 2)).to(tl.float32)
    sigma = tl.load(Sigma).to(tl.float32)
    bell = tl.where(lane < SIDE, tl.exp(-square / (2.0 * sigma * sigma)), 0.0)
    tap = bell / tl.sum(bell, 0)
    slope = tap * (square - tl.sum(tap * square, 0)) / (sigma * sigma * sigma)
    tl.store(Taps + lane, tap, mask=lane < SIDE)
    tl.store(Taps + SIDE + lane, slope, mask=lane < SIDE)


@triton.jit
def _blur_pass(
    X, Taps, Out, H, W, DOWN: tl.constexpr, SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr
):
    tiles = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // tiles).to(tl.int64) * H * W
    h = (tl.program_id(0) % tiles * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    w = (tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    inside = (h < H) & (w < W)
    at = plane + h * W + w
    blurred = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(SIDE):
        shift = i - SIDE // 2
        if DOWN:
            x = tl.load(X + at + shift * W, mask=inside & (h + shift >= 0) & (h + shift < H), other=0.0)
        else:
            x = tl.load(X + at + shift, mask=inside & (w + shift >= 0) & (w + shift < W), other=0.0)
        blurred += tl.load(Taps + i) * x.to(tl.float32)
    tl.store(Out + at, blurred, mask=inside)


def _patch(H, W):
    BLOCK_W = min(128, triton.next_power_of_2(W))
    return {"BLOCK_H": min(1024 // BLOCK_W, triton.next_power_of_2(H)), "BLOCK_W": BLOCK_W, "num_warps": 4}


def _grid(x, patch):
    B, C, H, W = x.shape
    return B * C * triton.cdiv(H, patch["BLOCK_H"]), triton.cdiv(W, patch["BLOCK_W"])


def forward(x, sigma, side):
    x = x.contiguous()
    H, W = x.shape[2:]
    taps = torch.empty(2, side, device=x.device, dtype=torch.float32)
    _gaussian_taps[(1,)](sigma, taps, SIDE=side, LANES=triton.next_power_of_2(side), num_warps=1)
    rows = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    patch = _patch(H, W)
    _blur_pass[_grid(x, patch)](x, taps, rows, H, W, DOWN=False, SIDE=side, **patch)
    _blur_pass[_grid(x, patch)](rows, taps, y, H, W, DOWN=True, SIDE=side, **patch)
    return y, (x, sigma, taps)


# --- backward ---
@triton.jit
def _blur_down_bwd(
    DY, X, Taps, DRows, Parts, C, H, W, dy_b, dy_c, dy_h, dy_w,
    SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // tiles).to(tl.int64)
    h = (tl.program_id(0) % tiles * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    w = (tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    inside = (h < H) & (w < W)
    at = plane * H * W + h * W + w
    dy_at = DY + plane // C * dy_b + plane % C * dy_c + w.to(tl.int64) * dy_w
    drows = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    sloped = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    blurred = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(SIDE):
        shift = i - SIDE // 2
        tap = tl.load(Taps + i)
        there = inside & (h + shift >= 0) & (h + shift < H)
        dy = tl.load(dy_at + (h + shift).to(tl.int64) * dy_h, mask=there, other=0.0).to(tl.float32)
        drows += tap * dy
        sloped += tl.load(Taps + SIDE + i) * dy
        # The own pixel of R x, tap by tap beside it.
        x = tl.load(X + at + shift, mask=inside & (w + shift >= 0) & (w + shift < W), other=0.0)
        blurred += tap * x.to(tl.float32)
    tl.store(DRows + at, drows, mask=inside)
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(sloped * blurred))


@triton.jit
def _blur_rows_bwd(DRows, X, Taps, DX, Parts, H, W, SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    tiles = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // tiles).to(tl.int64)
    h = (tl.program_id(0) % tiles * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    w = (tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    inside = (h < H) & (w < W)
    at = plane * H * W + h * W + w
    dx = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    sloped = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(SIDE):
        shift = i - SIDE // 2
        drows = tl.load(DRows + at + shift, mask=inside & (w + shift >= 0) & (w + shift < W), other=0.0)
        dx += tl.load(Taps + i) * drows
        sloped += tl.load(Taps + SIDE + i) * drows
    tl.store(DX + at, dx, mask=inside)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(sloped * x))


def backward(saved, grad_y, needs=None):
    x, sigma, taps = saved
    C, H, W = x.shape[1:]
    side = taps.shape[1]
    patch = _patch(H, W)
    grid = _grid(x, patch)
    drows = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    dx = torch.empty_like(x)
    parts = torch.empty(2, *grid, device=x.device, dtype=torch.float32)
    _blur_down_bwd[grid](grad_y, x, taps, drows, parts[0], C, H, W, *grad_y.stride(), SIDE=side, **patch)
    _blur_rows_bwd[grid](drows, x, taps, dx, parts[1], H, W, SIDE=side, **patch)
    return dx, parts.sum().to(sigma.dtype).view(sigma.shape)


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 16, "W": 32, "side": 5},
    {"B": 2, "C": 3, "H": 11, "W": 149, "side": 7},
    {"B": 1, "C": 2, "H": 8, "W": 9, "side": 3, "dtype": "bfloat16"},
    {"B": 1, "C": 1, "H": 3, "W": 6, "side": 9, "dtype": "float16"},
)
BENCH = ({"B": 16, "C": 3, "H": 1024, "W": 1024, "side": 13, "dtype": "bfloat16"},)


def make_args(B, C, H, W, side, dtype="float32", device="cpu", seed=0):
    if side % 2 == 0:
        raise ValueError("the window has a centre: side is odd")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.tensor([0.2 * side + 0.3], device=device), side


def reference(x, sigma, side):
    B, C, H, W = x.shape
    square = (torch.arange(side, device=x.device) - side // 2) ** 2
    taps = torch.softmax(-square / (2.0 * sigma**2), 0)
    planes = x.float().view(B * C, 1, H, W)
    rows = torch.nn.functional.conv2d(planes, taps.view(1, 1, 1, side), padding=(0, side // 2))
    y = torch.nn.functional.conv2d(rows, taps.view(1, 1, side, 1), padding=(side // 2, 0))
    return y.view(x.shape).to(x.dtype)
