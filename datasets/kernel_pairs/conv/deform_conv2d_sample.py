"""Deformable sampling: each pixel adds learned places of the image, with gradients for places, weights and image.

y[p, c] = sum over taps of m[p, tap] s, where s is x at p + tap + offset[p, tap], between four pixels and zero outside;
channels of a group share offsets and modulation m. With a_ij the sums over channels of dy x at the corners,
dm is their bilinear mean, and the offset gradient is m times the mean of their differences along that axis: four sums
of a tile serve all three. The four shares of dx go out as fp32 atomics, in rows of a group's channels.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "deform_conv2d_sample",
    "family": "conv",
    "op": "deformable_sampling",
    "schema": 1,
    "techniques": ("one-launch", "atomics", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "offset", "modulation"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _place(Offset, at, step, live):
    """The pixel at or before a learned coordinate, and how far the coordinate lies beyond it."""
    moved = step + tl.load(Offset + at, mask=live, other=0.0).to(tl.float32)
    before = tl.floor(moved)
    return before.to(tl.int32), moved - before


@triton.jit
def _corner(X, image, h, w, c, H, W, row, live, inside_c):
    """Channels of pixel (h, w) in fp32, where that row starts, and which lanes are inside."""
    inside = (live & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None] & inside_c[None, :]
    at = ((image * H + h) * W + w)[:, None] * row + c[None, :]
    return tl.load(X + at, mask=inside, other=0.0).to(tl.float32), at, inside


@triton.jit
def _deform_fwd(
    X, Offset, Modulation, Y, pixels, H, W, C: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    pixel = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m = pixel.to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    inside_c = channel < C
    c = group * C + channel
    live = m < pixels
    image = (pixel // W // H).to(tl.int64)
    row = pixel // W % H
    column = pixel % W
    y = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for tap in range(SIDE * SIDE):
        place = (m * groups + group) * SIDE * SIDE + tap
        weight = tl.load(Modulation + place, mask=live, other=0.0).to(tl.float32)
        h, down = _place(Offset, 2 * place, row + (tap // SIDE - SIDE // 2), live)
        w, right = _place(Offset, 2 * place + 1, column + (tap % SIDE - SIDE // 2), live)
        top_left, _, _ = _corner(X, image, h, w, c, H, W, groups * C, live, inside_c)
        top_right, _, _ = _corner(X, image, h, w + 1, c, H, W, groups * C, live, inside_c)
        low_left, _, _ = _corner(X, image, h + 1, w, c, H, W, groups * C, live, inside_c)
        low_right, _, _ = _corner(X, image, h + 1, w + 1, c, H, W, groups * C, live, inside_c)
        top = top_left + right[:, None] * (top_right - top_left)
        low = low_left + right[:, None] * (low_right - low_left)
        y += weight[:, None] * (top + down[:, None] * (low - top))
    tl.store(Y + m[:, None] * groups * C + c[None, :], y, mask=live[:, None] & inside_c[None, :])


def _tiles(pixels, C):
    BLOCK_C = triton.next_power_of_2(C)
    return min(max(1, 2048 // BLOCK_C), triton.next_power_of_2(pixels)), BLOCK_C


def forward(x, offset, modulation):
    x, offset, modulation = x.contiguous(), offset.contiguous(), modulation.contiguous()
    B, H, W, channels = x.shape
    G, TAPS = modulation.shape[3:]
    y = torch.empty_like(x)
    BLOCK_M, BLOCK_C = _tiles(B * H * W, channels // G)
    _deform_fwd[(triton.cdiv(B * H * W, BLOCK_M), G)](
        x, offset, modulation, y, B * H * W, H, W, C=channels // G, SIDE=round(TAPS**0.5),
        BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=8,
    )  # fmt: skip
    return y, (x, offset, modulation)


# --- backward ---
@triton.jit
def _deform_bwd(
    DY, X, Offset, Modulation, DX, DOffset, DModulation, pixels, H, W, dy_n, dy_h, dy_w, dy_c,
    NEED_X: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    pixel = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m = pixel.to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    inside_c = channel < C
    c = group * C + channel
    live = m < pixels
    image = (pixel // W // H).to(tl.int64)
    row = pixel // W % H
    column = pixel % W
    dy_at = DY + image * dy_n + row.to(tl.int64) * dy_h + column.to(tl.int64) * dy_w
    dy_at = dy_at[:, None] + c.to(tl.int64)[None, :] * dy_c
    dy = tl.load(dy_at, mask=live[:, None] & inside_c[None, :], other=0.0).to(tl.float32)
    for tap in range(SIDE * SIDE):
        place = (m * groups + group) * SIDE * SIDE + tap
        weight = tl.load(Modulation + place, mask=live, other=0.0).to(tl.float32)
        h, down = _place(Offset, 2 * place, row + (tap // SIDE - SIDE // 2), live)
        w, right = _place(Offset, 2 * place + 1, column + (tap % SIDE - SIDE // 2), live)
        up = 1.0 - down
        left = 1.0 - right
        x, at, inside = _corner(X, image, h, w, c, H, W, groups * C, live, inside_c)
        top_left = tl.sum(dy * x, 1)
        if NEED_X:
            tl.atomic_add(DX + at, dy * (weight * up * left)[:, None], mask=inside, sem="relaxed")
        x, at, inside = _corner(X, image, h, w + 1, c, H, W, groups * C, live, inside_c)
        top_right = tl.sum(dy * x, 1)
        if NEED_X:
            tl.atomic_add(DX + at, dy * (weight * up * right)[:, None], mask=inside, sem="relaxed")
        x, at, inside = _corner(X, image, h + 1, w, c, H, W, groups * C, live, inside_c)
        low_left = tl.sum(dy * x, 1)
        if NEED_X:
            tl.atomic_add(DX + at, dy * (weight * down * left)[:, None], mask=inside, sem="relaxed")
        x, at, inside = _corner(X, image, h + 1, w + 1, c, H, W, groups * C, live, inside_c)
        low_right = tl.sum(dy * x, 1)
        if NEED_X:
            tl.atomic_add(DX + at, dy * (weight * down * right)[:, None], mask=inside, sem="relaxed")
        top = left * top_left + right * top_right
        low = left * low_left + right * low_right
        tl.store(DModulation + place, up * top + down * low, mask=live)
        tl.store(DOffset + 2 * place, weight * (low - top), mask=live)
        across = up * (top_right - top_left) + down * (low_right - low_left)
        tl.store(DOffset + 2 * place + 1, weight * across, mask=live)


def backward(saved, grad_y, needs=None):
    x, offset, modulation = saved
    need_x, _, _ = needs or (True, True, True)
    B, H, W, channels = x.shape
    G, TAPS = modulation.shape[3:]
    dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    doffset, dmodulation = torch.empty_like(offset), torch.empty_like(modulation)
    BLOCK_M, BLOCK_C = _tiles(B * H * W, channels // G)
    _deform_bwd[(triton.cdiv(B * H * W, BLOCK_M), G)](
        grad_y, x, offset, modulation, dx, doffset, dmodulation, B * H * W, H, W, *grad_y.stride(),
        NEED_X=need_x, C=channels // G, SIDE=round(TAPS**0.5), BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=8,
    )  # fmt: skip
    return dx.to(x.dtype) if need_x else None, doffset, dmodulation


# --- check ---
SWEEP = (
    {"B": 1, "H": 8, "W": 8, "G": 2, "C": 16, "SIDE": 3},
    {"B": 2, "H": 5, "W": 9, "G": 3, "C": 11, "SIDE": 3},
    {"B": 1, "H": 6, "W": 4, "G": 1, "C": 8, "SIDE": 5, "dtype": "bfloat16"},
    {"B": 1, "H": 3, "W": 7, "G": 2, "C": 4, "SIDE": 1, "dtype": "float16"},
)
BENCH = ({"B": 16, "H": 56, "W": 56, "G": 4, "C": 32, "SIDE": 3, "dtype": "bfloat16"},)


def make_args(B, H, W, G, C, SIDE, dtype="float32", device="cpu", seed=0):
    if SIDE % 2 == 0:
        raise ValueError("the window has a centre: SIDE is odd")
    g = torch.Generator().manual_seed(seed)
    x, offset = torch.randn(B, H, W, G * C, generator=g), torch.randn(B, H, W, G, SIDE * SIDE, 2, generator=g)
    modulation = torch.randn(B, H, W, G, SIDE * SIDE, generator=g).softmax(-1)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, offset, modulation))


def reference(x, offset, modulation):
    B, H, W, channels = x.shape
    G, TAPS = modulation.shape[3:]
    reach = torch.arange(round(TAPS**0.5), device=x.device) - round(TAPS**0.5) // 2
    taps = torch.cartesian_prod(reach, reach)
    pixels = torch.cartesian_prod(torch.arange(H, device=x.device), torch.arange(W, device=x.device))
    # Places (B G, pixels, taps, 2), in units of the image from -1 to 1, x before y.
    places = (pixels[:, None, None] + taps).view(H, W, 1, TAPS, 2) + offset.float()
    places = places.permute(0, 3, 1, 2, 4, 5).reshape(B * G, H * W, TAPS, 2)
    places = (2.0 * places + 1.0) / torch.tensor([H, W], device=x.device) - 1.0
    image = x.float().view(B, H, W, G, channels // G).permute(0, 3, 4, 1, 2).reshape(B * G, channels // G, H, W)
    sampled = torch.nn.functional.grid_sample(image, places.flip(-1), align_corners=False)
    weights = modulation.float().permute(0, 3, 1, 2, 4).reshape(B * G, 1, H * W, TAPS)
    y = (sampled * weights).sum(-1).view(B, channels, H, W)
    return y.permute(0, 2, 3, 1).to(x.dtype)
