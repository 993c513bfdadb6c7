"""Volume rendering of rays: transmittance is a prefix sum of depth, dsigma holds the suffix sum of what lies behind."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "nerf_volume_render",
    "family": "geometry",
    "op": "volume_render",
    "schema": 1,
    "techniques": (
        "row-local",
        "multi-row-tile",
        "reverse-scan",
        "recompute",
        "strided-cotangent",
        "optional-cotangent",
    ),
    "saves": (),
    "grads": ("sigma", "color", "length"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _render_fwd(
    Sigma, Color, Length, Pixel, Opacity, R, S, CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr
):
    # Rows are rays, columns their samples from front to back.
    ray = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    s = tl.arange(0, BLOCK_S)
    at = ray[:, None] * S + s[None, :]
    ok = (ray[:, None] < R) & (s[None, :] < S)
    sigma = tl.load(Sigma + at, mask=ok, other=0.0).to(tl.float32)
    depth = sigma * tl.load(Length + at, mask=ok, other=0.0).to(tl.float32)
    # Light left in front of a sample times what the sample stops.
    weight = tl.exp(depth - tl.cumsum(depth, 1)) * (1.0 - tl.exp(-depth))
    tl.store(Opacity + ray, tl.sum(weight, 1), mask=ray < R)
    for channel in tl.static_range(CHANNELS):
        color = tl.load(Color + at * CHANNELS + channel, mask=ok, other=0.0).to(tl.float32)
        tl.store(Pixel + ray * CHANNELS + channel, tl.sum(weight * color, 1), mask=ray < R)


def forward(sigma, color, length):
    sigma, color, length = sigma.contiguous(), color.contiguous(), length.contiguous()
    R, S, CHANNELS = color.shape
    pixel = torch.empty(R, CHANNELS, device=color.device, dtype=color.dtype)
    opacity = torch.empty(R, device=sigma.device, dtype=sigma.dtype)
    BLOCK_S = triton.next_power_of_2(S)
    BLOCK_R = max(1, 1024 // BLOCK_S)
    _render_fwd[(triton.cdiv(R, BLOCK_R),)](
        sigma, color, length, pixel, opacity, R, S, CHANNELS=CHANNELS, BLOCK_R=BLOCK_R, BLOCK_S=BLOCK_S, num_warps=4
    )
    return (pixel, opacity), (sigma, color, length)


# --- backward ---
@triton.jit
def _render_bwd(
    DPixel, DOpacity, Sigma, Color, Length, DSigma, DColor, DLength, R, S, dp_r, dp_c, do_r,
    HAS_DP: tl.constexpr, HAS_DO: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    ray = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    s = tl.arange(0, BLOCK_S)
    at = ray[:, None] * S + s[None, :]
    ok = (ray[:, None] < R) & (s[None, :] < S)
    sigma = tl.load(Sigma + at, mask=ok, other=0.0).to(tl.float32)
    length = tl.load(Length + at, mask=ok, other=0.0).to(tl.float32)
    depth = sigma * length
    # Light in front of each sample, and light that passes it.
    front = tl.exp(depth - tl.cumsum(depth, 1))
    passed = front * tl.exp(-depth)
    weight = front * (1.0 - tl.exp(-depth))
    dweight = tl.zeros((BLOCK_R, BLOCK_S), tl.float32)
    if HAS_DO:
        dweight += tl.load(DOpacity + ray * do_r, mask=ray < R, other=0.0).to(tl.float32)[:, None]
    # Tiles (ray, sample, channel): the largest tensors are read and written as they lie, without gaps.
    c = tl.arange(0, BLOCK_C)
    color_at = at[:, :, None] * CHANNELS + c[None, None, :]
    color_ok = ok[:, :, None] & (c[None, None, :] < CHANNELS)
    dp = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    if HAS_DP:
        in_pixel = (ray[:, None] < R) & (c[None, :] < CHANNELS)
        dp = tl.load(DPixel + ray[:, None] * dp_r + c[None, :] * dp_c, mask=in_pixel, other=0.0).to(tl.float32)
        color = tl.load(Color + color_at, mask=color_ok, other=0.0).to(tl.float32)
        dweight += tl.sum(dp[:, None, :] * color, 2)
    tl.store(DColor + color_at, dp[:, None, :] * weight[:, :, None], mask=color_ok)
    # More depth here stops more of the light that passed this sample, and dims all behind it in proportion.
    gain = tl.where(ok, dweight * weight, 0.0)
    behind = tl.cumsum(gain, 1, reverse=True) - gain
    ddepth = dweight * passed - behind
    tl.store(DSigma + at, ddepth * length, mask=ok)
    tl.store(DLength + at, ddepth * sigma, mask=ok)


def backward(saved, grad_pixel, grad_opacity, needs=None):
    sigma, color, length = saved
    R, S, CHANNELS = color.shape
    dsigma, dcolor, dlength = torch.empty_like(sigma), torch.empty_like(color), torch.empty_like(length)
    dp = color[:, 0] if grad_pixel is None else grad_pixel
    do = sigma[:, 0] if grad_opacity is None else grad_opacity
    BLOCK_S = triton.next_power_of_2(S)
    BLOCK_R = max(1, 512 // BLOCK_S)
    _render_bwd[(triton.cdiv(R, BLOCK_R),)](
        dp, do, sigma, color, length, dsigma, dcolor, dlength, R, S, dp.stride(0), dp.stride(1), do.stride(0),
        HAS_DP=grad_pixel is not None, HAS_DO=grad_opacity is not None, CHANNELS=CHANNELS,
        BLOCK_R=BLOCK_R, BLOCK_S=BLOCK_S, BLOCK_C=triton.next_power_of_2(CHANNELS), num_warps=4,
    )  # fmt: skip
    return dsigma, dcolor, dlength


# --- check ---
SWEEP = ({"R": 16, "S": 128}, {"R": 7, "S": 75, "dtype": "float16"}, {"R": 5, "S": 64, "dtype": "bfloat16"})
BENCH = ({"R": 65536, "S": 128, "dtype": "float32"},)


def make_args(R, S, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Densities are not negative, a third of the samples are empty; rays end up about nine tenths opaque.
    sigma = (torch.randn(R, S, generator=g) + 0.5).relu() * (3.0 / S)
    color = torch.rand(R, S, 3, generator=g)
    length = torch.rand(R, S, generator=g) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (sigma, color, length))


def reference(sigma, color, length):
    depth = sigma.float() * length.float()
    weight = torch.exp(depth - depth.cumsum(1)) * (1.0 - torch.exp(-depth))
    return (weight[:, :, None] * color.float()).sum(1).to(color.dtype), weight.sum(1).to(sigma.dtype)
