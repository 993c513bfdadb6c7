"""Group norm over images, a shift and scale per image and channel, and SiLU, as in diffusion U-Nets."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def groupnorm_silu_fwd_kernel(X, WEIGHT, BIAS, SCALE, SHIFT, Y, CHANNELS, GROUPS, SIZE, eps, BLOCK: tl.constexpr):
    # One program normalises one group of one image: CHANNELS // GROUPS planes of SIZE pixels, which lie together.
    image = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    width = CHANNELS // GROUPS
    first = image * CHANNELS * SIZE + group * width * SIZE
    count = width * SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(X + first + at, mask=at < count, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / count
    spread = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(X + first + at, mask=at < count, other=0.0).to(tl.float32)
        spread += tl.where(at < count, (x - mean) * (x - mean), 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(spread, axis=0) / count + eps)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < count
        channel = group * width + at // SIZE
        x = tl.load(X + first + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(WEIGHT + channel, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(BIAS + channel, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(SCALE + image * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
        shift = tl.load(SHIFT + image * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
        n = ((x - mean) * rstd * w + b) * (1.0 + scale) + shift
        tl.store(Y + first + at, n * tl.sigmoid(n), mask=mask)


@autodiff(inputs_require_grad=("x", "weight", "bias", "scale", "shift"))
def groupnorm_silu(x, weight, bias, scale, shift, groups, eps=1e-5):
    """Normalise x (B, C, H, W) in `groups`, with weight, bias (C,) and scale, shift (B, C); returns y like x."""
    x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
    B, C, H, W = x.shape
    y = torch.empty_like(x)
    BLOCK = min(4096, triton.next_power_of_2(C // groups * H * W))
    groupnorm_silu_fwd_kernel[(B * groups,)](
        x, weight, bias, scale, shift, y, C, groups, H * W, eps, BLOCK=BLOCK, num_warps=8
    )
    return y


SWEEP = [
    dict(B=16, C=512, H=32, W=32, groups=32),
    dict(B=8, C=256, H=64, W=64, groups=32, dtype="bfloat16"),
    dict(B=3, C=12, H=5, W=7, groups=4),
]


def make_args(B, C, H, W, groups, dtype="float32", device="cuda"):
    dtype = getattr(torch, dtype)
    x = (1.0 + torch.randn(B, C, H, W, device=device)).to(dtype)
    weight, bias = torch.randn(2, C, device=device)
    scale, shift = torch.randn(2, B, C, device=device)
    return x, weight, bias, scale, shift, groups


def reference(x, weight, bias, scale, shift, groups, eps=1e-5):
    n = torch.nn.functional.group_norm(x.to(weight.dtype), groups, weight, bias, eps)
    n = n * (1.0 + scale)[:, :, None, None] + shift[:, :, None, None]
    return torch.nn.functional.silu(n).to(x.dtype)
