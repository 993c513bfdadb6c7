"""Bilateral filter: each pair of pixels in a window is weighed once, and serves both pixels' gradients and sigma's.

y[p] = sum over q of k(p, q) x[q] / Z[p], with k = exp(-|p - q|^2 / 2 space^2 - (x[p] - x[q])^2 / 2 range^2) over the
window's pixels inside the image. k is symmetric, so the program that owns p gathers, for each q of its window, its
parts as neighbour in the window around q and as centre of its own from the same k. With c = dy / Z, which a first
launch prepares, dx[p] = sum over q of k (c[q] (1 + (x[p] - y[q]) s) + c[p] (x[q] - y[p]) s), s = (x[q] - x[p]) /
range^2.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bilateral_filter_window",
    "family": "pool_vision",
    "op": "bilateral_filter",
    "schema": 1,
    "techniques": (
        "gather-form", "halo", "recompute", "saved-output", "delta-preprocess", "scalar-gradient", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("mean: fp32 (B, C, H, W)", "norm: fp32 (B, C, H, W)"),
    "grads": ("x", "sigma_range"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _kernel_weight(x, other, distance, space_scale, range_scale):
    """exp(-distance space_scale - (x - other)^2 range_scale), scales in units of log 2."""
    apart = x - other
    return tl.exp2(-(distance * space_scale) - apart * apart * range_scale)


@triton.jit
def _bilateral_fwd(
    X, SigmaRange, Y, Mean, Norm, H, W, space_scale,
    SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64) * H * W
    h = tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (h[:, None] < H) & (w[None, :] < W)
    sigma = tl.load(SigmaRange).to(tl.float32)
    range_scale = 0.7213475204444817 / (sigma * sigma)
    at = plane + h[:, None] * W + w[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    norm = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(-(SIDE // 2), SIDE // 2 + 1):
        for j in tl.static_range(-(SIDE // 2), SIDE // 2 + 1):
            there = ((h + i >= 0) & (h + i < H))[:, None] & ((w + j >= 0) & (w + j < W))[None, :]
            other = tl.load(X + at + i * W + j, mask=there, other=0.0).to(tl.float32)
            k = tl.where(there, _kernel_weight(x, other, i * i + j * j, space_scale, range_scale), 0.0)
            total += k * other
            norm += k
    # Beside the image norm may be zero; nothing is stored there.
    mean = total / tl.where(inside, norm, 1.0)
    tl.store(Y + at, mean, mask=inside)
    tl.store(Mean + at, mean, mask=inside)
    tl.store(Norm + at, norm, mask=inside)


def _patch(H, W):
    BLOCK_W = min(64, triton.next_power_of_2(W))
    return {"BLOCK_H": min(1024 // BLOCK_W, triton.next_power_of_2(H)), "BLOCK_W": BLOCK_W}


def forward(x, sigma_range, side, sigma_space):
    x = x.contiguous()
    B, C, H, W = x.shape
    y = torch.empty_like(x)
    mean, norm = (torch.empty(x.shape, device=x.device, dtype=torch.float32) for _ in range(2))
    patch = _patch(H, W)
    space_scale = 0.7213475204444817 / sigma_space**2
    _bilateral_fwd[(B * C * triton.cdiv(H, patch["BLOCK_H"]), triton.cdiv(W, patch["BLOCK_W"]))](
        x, sigma_range, y, mean, norm, H, W, space_scale, SIDE=side, **patch, num_warps=4
    )
    return y, (x, sigma_range, mean, norm, side, sigma_space)


# --- backward ---
@triton.jit
def _per_norm(DY, Norm, Out, rows, C, H, W, dy_b, dy_c, dy_h, dy_w, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    # dy / Z in the order of x: read once here, and SIDE^2 times from neighbouring windows.
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (r[:, None] < rows) & (w[None, :] < W)
    row = (r // H // C).to(tl.int64) * dy_b + (r // H % C).to(tl.int64) * dy_c + (r % H).to(tl.int64) * dy_h
    at = r.to(tl.int64)[:, None] * W + w[None, :]
    dy = tl.load(DY + row[:, None] + w.to(tl.int64)[None, :] * dy_w, mask=inside, other=0.0).to(tl.float32)
    norm = tl.load(Norm + at, mask=inside, other=1.0)
    tl.store(Out + at, dy / norm, mask=inside)


@triton.jit
def _bilateral_bwd(
    X, SigmaRange, Mean, PerNorm, DX, Parts, H, W, space_scale,
    SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64) * H * W
    h = tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (h[:, None] < H) & (w[None, :] < W)
    sigma = tl.load(SigmaRange).to(tl.float32)
    range_scale = 0.7213475204444817 / (sigma * sigma)
    at = plane + h[:, None] * W + w[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(Mean + at, mask=inside, other=0.0)
    c = tl.load(PerNorm + at, mask=inside, other=0.0)
    as_neighbour = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    through_weights = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    spread = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(-(SIDE // 2), SIDE // 2 + 1):
        for j in tl.static_range(-(SIDE // 2), SIDE // 2 + 1):
            there = ((h + i >= 0) & (h + i < H))[:, None] & ((w + j >= 0) & (w + j < W))[None, :]
            other = tl.load(X + at + i * W + j, mask=there, other=0.0).to(tl.float32)
            other_y = tl.load(Mean + at + i * W + j, mask=there, other=0.0)
            other_c = tl.load(PerNorm + at + i * W + j, mask=there, other=0.0)
            k = tl.where(there, _kernel_weight(x, other, i * i + j * j, space_scale, range_scale), 0.0)
            apart = other - x
            as_centre = c * k * (other - y)
            as_neighbour += other_c * k
            through_weights += (other_c * k * (x - other_y) + as_centre) * apart
            spread += as_centre * apart * apart
    tl.store(DX + at, as_neighbour + through_weights / (sigma * sigma), mask=inside)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(Parts + program, tl.sum(spread) / (sigma * sigma * sigma))


def backward(saved, grad_y, needs=None):
    x, sigma_range, mean, norm, side, sigma_space = saved
    B, C, H, W = x.shape
    dx = torch.empty_like(x)
    per_norm = torch.empty_like(norm)
    patch = _patch(H, W)
    grid = (B * C * triton.cdiv(H, patch["BLOCK_H"]), triton.cdiv(W, patch["BLOCK_W"]))
    parts = torch.empty(grid[0] * grid[1], device=x.device, dtype=torch.float32)
    BLOCK_W = min(256, triton.next_power_of_2(W))
    _per_norm[(triton.cdiv(B * C * H, 1024 // BLOCK_W), triton.cdiv(W, BLOCK_W))](
        grad_y, norm, per_norm, B * C * H, C, H, W, *grad_y.stride(), BLOCK_R=1024 // BLOCK_W, BLOCK_W=BLOCK_W
    )
    space_scale = 0.7213475204444817 / sigma_space**2
    _bilateral_bwd[grid](x, sigma_range, mean, per_norm, dx, parts, H, W, space_scale, SIDE=side, **patch, num_warps=8)
    return dx, parts.sum().to(sigma_range.dtype).view(sigma_range.shape)


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 8, "W": 16, "side": 3},
    {"B": 2, "C": 1, "H": 19, "W": 13, "side": 5},
    {"B": 1, "C": 1, "H": 6, "W": 9, "side": 3, "dtype": "bfloat16"},
    {"B": 1, "C": 2, "H": 3, "W": 5, "side": 7, "dtype": "float16"},
)
BENCH = ({"B": 8, "C": 3, "H": 640, "W": 640, "side": 7, "dtype": "float32"},)


def make_args(B, C, H, W, side, dtype="float32", device="cpu", seed=0):
    if side % 2 == 0:
        raise ValueError("the window has a centre: side is odd")
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.tensor([0.3], device=device, dtype=x.dtype), side, side / 4


def reference(x, sigma_range, side, sigma_space):
    H, W = x.shape[2:]
    half = side // 2
    xf = x.float()
    wide = torch.nn.functional.pad(xf, (half,) * 4)
    inside = torch.nn.functional.pad(torch.ones_like(xf[:1, :1]), (half,) * 4)
    total, norm = torch.zeros_like(xf), torch.zeros_like(xf)
    for i in range(side):
        for j in range(side):
            other = wide[:, :, i : i + H, j : j + W]
            distance = ((i - half) ** 2 + (j - half) ** 2) / (2 * sigma_space**2)
            k = inside[:, :, i : i + H, j : j + W] * torch.exp(
                -distance - (xf - other) ** 2 / (2 * sigma_range.float() ** 2)
            )
            total, norm = total + k * other, norm + k
    return (total / norm).to(x.dtype)
