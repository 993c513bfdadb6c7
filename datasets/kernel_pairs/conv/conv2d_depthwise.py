"""Depthwise conv2d NCHW: one launch walks planes of a channel, writes dx by flipped taps and sums dweight per tap.

A program owns one channel of a group of images. For each patch of a plane it adds w[tap] dy shifted back by the tap to
dx. Then it runs through the taps and multiplies the unshifted dy of all its planes with x shifted forth: one reduction
for each tap, whose number is kept in a lane of a vector. dweight leaves as one short row per channel and group.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "conv2d_depthwise",
    "family": "conv",
    "op": "conv2d_depthwise",
    "schema": 1,
    "techniques": ("one-launch", "halo", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _depthwise_fwd(
    X, Weight, Y, C, H, W, SIDE: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(H, PATCH_H)
    plane = (tl.program_id(0) // down).to(tl.int64)
    h = tl.program_id(0) % down * PATCH_H + tl.arange(0, PATCH_H)
    w = tl.program_id(1) * PATCH_W + tl.arange(0, PATCH_W)
    X += plane * H * W
    weights = Weight + plane % C * SIDE * SIDE
    y = tl.zeros((PATCH_H, PATCH_W), tl.float32)
    for kh in range(SIDE):
        for kw in tl.static_range(SIDE):
            hx = h + (kh - SIDE // 2)
            wx = w + (kw - SIDE // 2)
            there = ((hx >= 0) & (hx < H))[:, None] & ((wx >= 0) & (wx < W))[None, :]
            x = tl.load(X + hx[:, None] * W + wx[None, :], mask=there, other=0.0).to(tl.float32)
            y += x * tl.load(weights + kh * SIDE + kw).to(tl.float32)
    tl.store(Y + plane * H * W + h[:, None] * W + w[None, :], y, mask=(h[:, None] < H) & (w[None, :] < W))


def _patch(H, W, most):
    PATCH_W = min(64, triton.next_power_of_2(W))
    return min(most // PATCH_W, triton.next_power_of_2(H)), PATCH_W


def forward(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    B, C, H, W = x.shape
    y = torch.empty_like(x)
    PATCH_H, PATCH_W = _patch(H, W, 2048)
    _depthwise_fwd[(B * C * triton.cdiv(H, PATCH_H), triton.cdiv(W, PATCH_W))](
        x, weight, y, C, H, W, SIDE=weight.shape[1], PATCH_H=PATCH_H, PATCH_W=PATCH_W, num_warps=4
    )
    return y, (x, weight)


# --- backward ---
@triton.jit
def _patch_of(step, first, down, across, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr):
    """Image, rows and columns of a group's patch."""
    h = step // across % down * PATCH_H + tl.arange(0, PATCH_H)
    w = step % across * PATCH_W + tl.arange(0, PATCH_W)
    return (first + step // (down * across)).to(tl.int64), h, w


@triton.jit
def _depthwise_bwd(
    DY, X, Weight, DX, Parts, B, C, H, W, dy_b, dy_c, dy_h, dy_w, images_each,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr, SIDE: tl.constexpr, LANES: tl.constexpr,
    PATCH_H: tl.constexpr, PATCH_W: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) % C
    group = tl.program_id(0) // C
    first = group * images_each
    down = tl.cdiv(H, PATCH_H)
    across = tl.cdiv(W, PATCH_W)
    weights = Weight + channel * SIDE * SIDE
    lane = tl.arange(0, LANES)
    dweight = tl.zeros((LANES,), tl.float32)
    steps = tl.minimum(images_each, B - first) * down * across
    if NEED_X:
        for step in tl.range(steps, num_stages=2):
            image, h, w = _patch_of(step, first, down, across, PATCH_H, PATCH_W)
            dy_plane = DY + image * dy_b + channel.to(tl.int64) * dy_c
            dx = tl.zeros((PATCH_H, PATCH_W), tl.float32)
            for kh in range(SIDE):
                for kw in tl.static_range(SIDE):
                    hy = h - (kh - SIDE // 2)
                    wy = w - (kw - SIDE // 2)
                    there = ((hy >= 0) & (hy < H))[:, None] & ((wy >= 0) & (wy < W))[None, :]
                    from_at = hy.to(tl.int64)[:, None] * dy_h + wy.to(tl.int64)[None, :] * dy_w
                    from_dy = tl.load(dy_plane + from_at, mask=there, other=0.0).to(tl.float32)
                    dx += from_dy * tl.load(weights + kh * SIDE + kw).to(tl.float32)
            out = DX + (image * C + channel) * H * W + h[:, None] * W + w[None, :]
            tl.store(out, dx, mask=(h[:, None] < H) & (w[None, :] < W))
    if NEED_W:
        # Tap by tap over all patches, which are in L1 by now: products meet lane by lane, and lanes once for each tap.
        for tap in range(SIDE * SIDE):
            products = tl.zeros((PATCH_H, PATCH_W), tl.float32)
            for step in range(steps):
                image, h, w = _patch_of(step, first, down, across, PATCH_H, PATCH_W)
                dy_at = h.to(tl.int64)[:, None] * dy_h + w.to(tl.int64)[None, :] * dy_w
                inside = (h[:, None] < H) & (w[None, :] < W)
                dy_plane = DY + image * dy_b + channel.to(tl.int64) * dy_c
                dy = tl.load(dy_plane + dy_at, mask=inside, other=0.0).to(tl.float32)
                hx = h + (tap // SIDE - SIDE // 2)
                wx = w + (tap % SIDE - SIDE // 2)
                there = ((hx >= 0) & (hx < H))[:, None] & ((wx >= 0) & (wx < W))[None, :]
                x_plane = X + (image * C + channel) * H * W
                # Beside the patch dy is zero.
                products += dy * tl.load(x_plane + hx[:, None] * W + wx[None, :], mask=there, other=0.0).to(tl.float32)
            dweight += tl.where(lane == tap, tl.sum(products), 0.0)
        tl.store(Parts + (group * C + channel) * SIDE * SIDE + lane, dweight, mask=lane < SIDE * SIDE)


def backward(saved, grad_y, needs=None):
    x, weight = saved
    need_x, need_w = needs or (True, True)
    B, C, H, W = x.shape
    SIDE = weight.shape[1]
    # Some 4000 programs, many waves on 132 processors: none waits for the last ones.
    images_each = triton.cdiv(B, max(1, min(B, 4224 // C)))
    groups = triton.cdiv(B, images_each)
    dx = torch.empty_like(x) if need_x else None
    parts = torch.empty(groups, C, SIDE, SIDE, device=x.device, dtype=torch.float32)
    PATCH_H, PATCH_W = _patch(H, W, 1024)
    _depthwise_bwd[(groups * C,)](
        grad_y, x, weight, dx, parts, B, C, H, W, *grad_y.stride(), images_each, NEED_X=need_x, NEED_W=need_w,
        SIDE=SIDE, LANES=triton.next_power_of_2(SIDE * SIDE), PATCH_H=PATCH_H, PATCH_W=PATCH_W, num_warps=4,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype) if need_w else None


# --- check ---
SWEEP = (
    {"B": 2, "C": 3, "H": 16, "W": 16, "SIDE": 3},
    {"B": 3, "C": 5, "H": 37, "W": 71, "SIDE": 3},
    {"B": 1, "C": 4, "H": 9, "W": 12, "SIDE": 5, "dtype": "bfloat16"},
    {"B": 2, "C": 2, "H": 8, "W": 3, "SIDE": 1, "dtype": "float16"},
)
BENCH = ({"B": 64, "C": 192, "H": 56, "W": 56, "SIDE": 5, "dtype": "bfloat16"},)


def make_args(B, C, H, W, SIDE, dtype="float32", device="cpu", seed=0):
    if SIDE % 2 == 0:
        raise ValueError("the window has a centre: SIDE is odd")
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, C, H, W, generator=g), torch.randn(C, SIDE, SIDE, generator=g) / SIDE)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    C, SIDE, _ = weight.shape
    return torch.nn.functional.conv2d(x, weight[:, None], padding=SIDE // 2, groups=C)
