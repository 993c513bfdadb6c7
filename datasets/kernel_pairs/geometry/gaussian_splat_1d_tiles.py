"""Splats on a line of pixels, blended front to back in tiles: the backward takes the lists apart from the back.

Each tile of pixels has a list of splats, nearest first. alpha = min(0.99, opacity exp(-(x - mean)^2 sharpness^2 / 2)),
a pixel takes alpha color from the light T left over, then T shrinks by 1 - alpha; once T is below a ten thousandth the
pixel is closed. Saved are the last T and the number of splats that a pixel took. The backward starts there, chunk by
chunk towards the front: within a chunk the light before a splat is T behind the chunk over a reverse cumulative
product of 1 - alpha, and what lies behind a splat is a reverse cumulative sum. Sums over a tile's pixels go to a splat
by one atomic add per word, a chunk of splats at a time.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gaussian_splat_1d_tiles",
    "family": "geometry",
    "op": "gaussian_splat",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "atomics", "varlen", "recompute", "strided-cotangent"),
    "saves": ("light: fp32 (W)", "taken: int32 (W)"),
    "grads": ("mean", "sharpness", "opacity", "color", "background"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _load_splats(Mean, Sharpness, Opacity, Order, n, last):
    """Numbers of list entries n and their parameters; entries past the list are transparent."""
    splat = tl.load(Order + n, mask=n < last, other=0).to(tl.int64)
    mean = tl.load(Mean + splat, mask=n < last, other=0.0)
    sharpness = tl.load(Sharpness + splat, mask=n < last, other=0.0)
    opacity = tl.load(Opacity + splat, mask=n < last, other=0.0)
    return splat, mean, sharpness, opacity


@triton.jit
def _splat_fwd(
    Mean, Sharpness, Opacity, Color, Background, Starts, Order, Image, Light, Taken, W,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    pixel = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    x = pixel.to(tl.float32) + 0.5
    n = tl.load(Starts + tile)
    last = tl.load(Starts + tile + 1)
    light = tl.full((BLOCK_P,), 1.0, tl.float32)
    taken = tl.zeros((BLOCK_P,), tl.int32)
    red = tl.zeros((BLOCK_P,), tl.float32)
    green = tl.zeros((BLOCK_P,), tl.float32)
    blue = tl.zeros((BLOCK_P,), tl.float32)
    # The rest of the list is skipped when every pixel of the tile is closed.
    while (n < last) & (tl.max(light, 0) > 1e-4):
        entry = n + tl.arange(0, BLOCK_G)
        splat, mean, sharpness, opacity = _load_splats(Mean, Sharpness, Opacity, Order, entry, last)
        off = (x[None, :] - mean[:, None]) * sharpness[:, None]
        alpha = tl.minimum(opacity[:, None] * tl.exp(-0.5 * off * off), 0.99)
        after = light[None, :] * tl.associative_scan(1.0 - alpha, 0, _product)
        before = after / (1.0 - alpha)
        lit = before > 1e-4
        weight = tl.where(lit, alpha * before, 0.0)
        red += tl.sum(weight * tl.load(Color + 3 * splat)[:, None], 0)
        green += tl.sum(weight * tl.load(Color + 3 * splat + 1)[:, None], 0)
        blue += tl.sum(weight * tl.load(Color + 3 * splat + 2)[:, None], 0)
        light *= tl.reduce(tl.where(lit, 1.0 - alpha, 1.0), 0, _product)
        taken += tl.sum((lit & (entry < last)[:, None]).to(tl.int32), 0)
        n += BLOCK_G
    inside = pixel < W
    tl.store(Light + pixel, light, mask=inside)
    tl.store(Taken + pixel, taken, mask=inside)
    tl.store(Image + 3 * pixel, red + light * tl.load(Background), mask=inside)
    tl.store(Image + 3 * pixel + 1, green + light * tl.load(Background + 1), mask=inside)
    tl.store(Image + 3 * pixel + 2, blue + light * tl.load(Background + 2), mask=inside)


TILE = 128
"""Pixels of a tile."""


def forward(mean, sharpness, opacity, color, background, starts, order, width):
    mean, sharpness, opacity, color = (t.contiguous() for t in (mean, sharpness, opacity, color))
    image = torch.empty(width, 3, device=mean.device, dtype=torch.float32)
    light = torch.empty(width, device=mean.device, dtype=torch.float32)
    taken = torch.empty(width, device=mean.device, dtype=torch.int32)
    _splat_fwd[(triton.cdiv(width, TILE),)](
        mean, sharpness, opacity, color, background, starts, order, image, light, taken, width,
        BLOCK_G=16, BLOCK_P=TILE, num_warps=4,
    )  # fmt: skip
    return image, (mean, sharpness, opacity, color, background, starts, order, light, taken)


# --- backward ---
@triton.jit
def _splat_bwd(
    DImage, Mean, Sharpness, Opacity, Color, Background, Starts, Order, Light, Taken, Splats, Parts, W, di_p, di_c,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    pixel = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = pixel < W
    x = pixel.to(tl.float32) + 0.5
    first = tl.load(Starts + tile)
    # Pixels outside take nothing and have no cotangent.
    taken = tl.load(Taken + pixel, mask=inside, other=0)
    light = tl.load(Light + pixel, mask=inside, other=1.0)
    g_red = tl.load(DImage + pixel * di_p, mask=inside, other=0.0)
    g_green = tl.load(DImage + pixel * di_p + di_c, mask=inside, other=0.0)
    g_blue = tl.load(DImage + pixel * di_p + 2 * di_c, mask=inside, other=0.0)
    tl.store(Parts + 3 * tile, tl.sum(light * g_red, 0))
    tl.store(Parts + 3 * tile + 1, tl.sum(light * g_green, 0))
    tl.store(Parts + 3 * tile + 2, tl.sum(light * g_blue, 0))
    ground = tl.load(Background) * g_red + tl.load(Background + 1) * g_green + tl.load(Background + 2) * g_blue
    # What comes from behind the chunk, as it enters the loss.
    behind = light * ground
    most = tl.max(taken, 0)
    chunks = tl.cdiv(most, BLOCK_G)
    for back in range(chunks):
        rank = (chunks - 1 - back) * BLOCK_G + tl.arange(0, BLOCK_G)
        splat, mean, sharpness, opacity = _load_splats(Mean, Sharpness, Opacity, Order, first + rank, first + most)
        apart = x[None, :] - mean[:, None]
        off = apart * sharpness[:, None]
        bell = tl.exp(-0.5 * off * off)
        raw = opacity[:, None] * bell
        lit = rank[:, None] < taken[None, :]
        alpha = tl.where(lit, tl.minimum(raw, 0.99), 0.0)
        passes = 1.0 - alpha
        before = light[None, :] / tl.associative_scan(passes, 0, _product, reverse=True)
        weight = alpha * before
        red = tl.load(Color + 3 * splat)[:, None]
        green = tl.load(Color + 3 * splat + 1)[:, None]
        blue = tl.load(Color + 3 * splat + 2)[:, None]
        seen = red * g_red[None, :] + green * g_green[None, :] + blue * g_blue[None, :]
        given = weight * seen
        rest = behind[None, :] + tl.cumsum(given, 0, reverse=True) - given
        dalpha = tl.where(lit & (raw < 0.99), before * seen - rest / passes, 0.0)
        pull = dalpha * raw * off
        real = rank < most
        at = Splats + 8 * splat
        tl.atomic_add(at, tl.sum(pull, 1) * sharpness, mask=real, sem="relaxed")
        tl.atomic_add(at + 1, -tl.sum(pull * apart, 1), mask=real, sem="relaxed")
        tl.atomic_add(at + 2, tl.sum(dalpha * bell, 1), mask=real, sem="relaxed")
        tl.atomic_add(at + 3, tl.sum(weight * g_red[None, :], 1), mask=real, sem="relaxed")
        tl.atomic_add(at + 4, tl.sum(weight * g_green[None, :], 1), mask=real, sem="relaxed")
        tl.atomic_add(at + 5, tl.sum(weight * g_blue[None, :], 1), mask=real, sem="relaxed")
        behind += tl.sum(given, 0)
        light /= tl.reduce(passes, 0, _product)


def backward(saved, grad_image, needs=None):
    mean, sharpness, opacity, color, background, starts, order, light, taken = saved
    width, tiles = light.numel(), triton.cdiv(light.numel(), TILE)
    # Eight words per splat keep the atomics of one within one sector of 32 bytes.
    splats = torch.zeros(mean.numel(), 8, device=mean.device, dtype=torch.float32)
    parts = torch.empty(tiles, 3, device=mean.device, dtype=torch.float32)
    _splat_bwd[(tiles,)](
        grad_image, mean, sharpness, opacity, color, background, starts, order, light, taken, splats, parts, width,
        *grad_image.stride(), BLOCK_G=8, BLOCK_P=TILE, num_warps=4,
    )  # fmt: skip
    dmean, dsharpness, dopacity = (splats[:, word].contiguous() for word in range(3))
    return dmean, dsharpness, dopacity, splats[:, 3:6].contiguous(), parts.sum(0)


# --- check ---
SWEEP = ({"W": 256, "G": 40}, {"W": 201, "G": 75}, {"W": 90, "G": 20})
BENCH = ({"W": 524288, "G": 131072, "PEAK": 0.1},)


def make_args(W, G, PEAK=1.1, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    mean, spread = W * torch.rand(G, generator=g), 8.0 + 32.0 * torch.rand(G, generator=g)
    # Up to 1.1 some are cut at 0.99 and pixels close; of faint ones rounding decides neither.
    opacity, color = PEAK * torch.rand(G, generator=g), torch.rand(G, 3, generator=g)
    # Lists of the tiles within three spreads: splats by depth first, then, stably, by tile.
    depth = torch.rand(G, generator=g).argsort()
    tiles = -(-W // TILE)
    low = ((mean - 3.0 * spread)[depth] / TILE).floor().clamp(0, tiles - 1).long()
    high = ((mean + 3.0 * spread)[depth] / TILE).floor().clamp(0, tiles - 1).long()
    count = high - low + 1
    entry = torch.arange(G).repeat_interleave(count)
    tile = low[entry] + torch.arange(len(entry)) - (count.cumsum(0) - count)[entry]
    tile, by_tile = tile.sort(stable=True)
    starts = torch.searchsorted(tile, torch.arange(tiles + 1)).int()
    order = depth[entry[by_tile]].int()
    tensors = (mean, 1.0 / spread, opacity, color, torch.rand(3, generator=g), starts, order)
    return *(t.to(device) for t in tensors), W


def reference(mean, sharpness, opacity, color, background, starts, order, width):
    tiles, count = starts.numel() - 1, (starts[1:] - starts[:-1])[:, None]
    rank = torch.arange(int(count.max()), device=mean.device)
    real = rank < count
    splat = order[(starts[:-1, None] + rank).clamp(max=order.numel() - 1).long()].long()
    x = torch.arange(tiles * TILE, device=mean.device).view(tiles, 1, TILE) + 0.5
    off = (x - mean[splat][:, :, None]) * sharpness[splat][:, :, None]
    alpha = (torch.where(real, opacity[splat], 0.0)[:, :, None] * torch.exp(-0.5 * off * off)).clamp(max=0.99)
    after = (1.0 - alpha).cumprod(1)
    before = after / (1.0 - alpha)
    lit = before > 1e-4
    light = torch.where(lit, 1.0 - alpha, 1.0).prod(1)
    image = torch.where(lit, alpha * before, 0.0).mT @ color[splat] + light[:, :, None] * background
    return image.view(-1, 3)[:width]
