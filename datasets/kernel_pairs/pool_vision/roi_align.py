"""ROI align, channels last: a bin's samples merge to separable weights, and its gradient reaches each pixel in one add.

A bin averages SAMPLES x SAMPLES bilinear samples of its region. Samples of a bin share pixels, and their weights
factor: pixel (h, w) has weight a[h] b[w], with a the mean over sample rows of the tents around them. So a program,
which owns one bin and a tile of channels, walks the rectangle of pixels that the bin touches, and adds a b dy to
each once, where sample by sample there would be four adds for each. Pixels between samples far apart weigh
nothing and are skipped. Regions overlap: adds are atomic, into fp32.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "roi_align",
    "family": "pool_vision",
    "op": "roi_align",
    "schema": 1,
    "techniques": ("atomics", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("features",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _samples(Rois, roi, axis, bin_of_axis, size, scale, BINS: tl.constexpr, SAMPLES: tl.constexpr, LANES: tl.constexpr):
    """Places of a bin's samples along an axis, clamped to the image, and the weight of each: zero far outside."""
    start = tl.load(Rois + 5 * roi + 1 + axis) * scale - 0.5
    step = (tl.load(Rois + 5 * roi + 3 + axis) * scale - 0.5 - start) / BINS
    lane = tl.arange(0, LANES)
    place = start + (bin_of_axis + (lane.to(tl.float32) + 0.5) / SAMPLES) * step
    counts = (lane < SAMPLES) & (place >= -1.0) & (place <= tl.cast(size, tl.float32))
    place = tl.minimum(tl.maximum(place, 0.0), tl.cast(size, tl.float32) - 1.0)
    # Lanes without a sample stand where the first one is, so that bounds taken over all lanes hold.
    first = tl.sum(tl.where(lane == 0, place, 0.0), 0)
    return tl.where(lane < SAMPLES, place, first), tl.where(counts, 1.0 / SAMPLES, 0.0)


@triton.jit
def _pixel_weight(places, weights, pixel):
    return tl.sum(weights * tl.maximum(1.0 - tl.abs(places - pixel), 0.0), 0)


@triton.jit
def _roi_align_fwd(
    X, Rois, Y, H, W, C, scale, BINS: tl.constexpr, SAMPLES: tl.constexpr, LANES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    roi = tl.program_id(0) // (BINS * BINS)
    ys, y_weights = _samples(Rois, roi, 1, tl.program_id(0) // BINS % BINS, H, scale, BINS, SAMPLES, LANES)
    xs, x_weights = _samples(Rois, roi, 0, tl.program_id(0) % BINS, W, scale, BINS, SAMPLES, LANES)
    image = tl.load(Rois + 5 * roi).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    left = tl.min(xs, 0).to(tl.int32)
    right = tl.minimum(tl.max(xs, 0).to(tl.int32) + 1, W - 1)
    y = tl.zeros((BLOCK_C,), tl.float32)
    for h in range(tl.min(ys, 0).to(tl.int32), tl.minimum(tl.max(ys, 0).to(tl.int32) + 1, H - 1) + 1):
        row_weight = _pixel_weight(ys, y_weights, h)
        if row_weight > 0.0:
            for w in range(left, right + 1):
                weight = row_weight * _pixel_weight(xs, x_weights, w)
                if weight > 0.0:
                    x_at = ((image * H + h) * W + w) * C + c
                    y += weight * tl.load(X + x_at, mask=c < C, other=0.0).to(tl.float32)
    tl.store(Y + tl.program_id(0).to(tl.int64) * C + c, y, mask=c < C)


def _lanes(samples, channels):
    return {"SAMPLES": samples, "LANES": triton.next_power_of_2(samples)}, min(256, triton.next_power_of_2(channels))


def forward(features, rois, bins, samples, scale):
    features, rois = features.contiguous(), rois.contiguous()
    _, H, W, C = features.shape
    y = torch.empty(rois.shape[0], bins, bins, C, device=features.device, dtype=features.dtype)
    lanes, BLOCK_C = _lanes(samples, C)
    _roi_align_fwd[(rois.shape[0] * bins * bins, triton.cdiv(C, BLOCK_C))](
        features, rois, y, H, W, C, scale, BINS=bins, **lanes, BLOCK_C=BLOCK_C, num_warps=2
    )
    return y, (rois, tuple(features.shape), samples, scale)


# --- backward ---
@triton.jit
def _roi_align_bwd(
    DY, Rois, DX, H, W, C, scale, dy_r, dy_h, dy_w, dy_c,
    BINS: tl.constexpr, SAMPLES: tl.constexpr, LANES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    roi = tl.program_id(0) // (BINS * BINS)
    bin_h = tl.program_id(0) // BINS % BINS
    bin_w = tl.program_id(0) % BINS
    ys, y_weights = _samples(Rois, roi, 1, bin_h, H, scale, BINS, SAMPLES, LANES)
    xs, x_weights = _samples(Rois, roi, 0, bin_w, W, scale, BINS, SAMPLES, LANES)
    image = tl.load(Rois + 5 * roi).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    dy_at = roi.to(tl.int64) * dy_r + bin_h.to(tl.int64) * dy_h + bin_w.to(tl.int64) * dy_w + c.to(tl.int64) * dy_c
    dy = tl.load(DY + dy_at, mask=c < C, other=0.0).to(tl.float32)
    left = tl.min(xs, 0).to(tl.int32)
    right = tl.minimum(tl.max(xs, 0).to(tl.int32) + 1, W - 1)
    for h in range(tl.min(ys, 0).to(tl.int32), tl.minimum(tl.max(ys, 0).to(tl.int32) + 1, H - 1) + 1):
        row_weight = _pixel_weight(ys, y_weights, h)
        if row_weight > 0.0:
            for w in range(left, right + 1):
                weight = row_weight * _pixel_weight(xs, x_weights, w)
                if weight > 0.0:
                    dx_at = ((image * H + h) * W + w) * C + c
                    tl.atomic_add(DX + dx_at, weight * dy, mask=c < C, sem="relaxed")


def backward(saved, grad_y, needs=None):
    rois, shape, samples, scale = saved
    _, H, W, C = shape
    dx = torch.zeros(shape, device=grad_y.device, dtype=torch.float32)
    R, bins = grad_y.shape[:2]
    lanes, BLOCK_C = _lanes(samples, C)
    _roi_align_bwd[(R * bins * bins, triton.cdiv(C, BLOCK_C))](
        grad_y, rois, dx, H, W, C, scale, *grad_y.stride(), BINS=bins, **lanes, BLOCK_C=BLOCK_C, num_warps=2
    )
    return dx.to(grad_y.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "H": 8, "W": 8, "C": 16, "R": 4, "bins": 2, "samples": 2},
    {"B": 2, "H": 9, "W": 13, "C": 21, "R": 5, "bins": 3, "samples": 3},
    {"B": 1, "H": 12, "W": 7, "C": 8, "R": 3, "bins": 2, "samples": 1, "dtype": "bfloat16"},
    {"B": 2, "H": 5, "W": 9, "C": 4, "R": 3, "bins": 1, "samples": 4, "dtype": "float16"},
)
BENCH = ({"B": 2, "H": 200, "W": 304, "C": 256, "R": 1024, "bins": 7, "samples": 2, "dtype": "bfloat16"},)


def make_args(B, H, W, C, R, bins, samples, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(B, H, W, C, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Boxes in pixels of an image four times as large, up to a third of it, some of them partly outside.
    image = torch.randint(0, B, (R, 1), generator=g).float()
    extent = 4.0 * torch.tensor([W, H])
    corner = (torch.rand(R, 2, generator=g) * 1.1 - 0.15) * extent
    far = corner + (0.02 + torch.rand(R, 2, generator=g) / 3) * extent
    return features, torch.cat((image, corner, far), 1).to(device), bins, samples, 0.25


def reference(features, rois, bins, samples, scale):
    _, H, W, C = features.shape
    index, box = rois[:, 0].long(), rois[:, 1:].float() * scale - 0.5
    steps = (torch.arange(bins * samples, device=rois.device) + 0.5) / (bins * samples)

    def corners(axis, size):
        """The two pixels around each sample of an axis with their weights."""
        place = box[:, axis, None] + steps * (box[:, axis + 2] - box[:, axis])[:, None]
        counts = ((place >= -1.0) & (place <= size)).float()
        place = place.clamp(0.0, size - 1.0)
        before = place.long()
        share = place - before
        return (before, counts * (1.0 - share)), ((before + 1).clamp(max=size - 1), counts * share)

    y = 0.0
    for h, h_weight in corners(1, H):
        for w, w_weight in corners(0, W):
            pixels = features[index[:, None, None], h[:, :, None], w[:, None, :]]
            y = y + pixels * (h_weight[:, :, None] * w_weight[:, None, :])[..., None]
    return y.view(-1, bins, samples, bins, samples, C).mean((2, 4)).to(features.dtype)
