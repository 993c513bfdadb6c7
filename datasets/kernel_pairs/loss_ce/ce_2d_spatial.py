"""Cross-entropy over the channel axis of (N, C, H, W): a lane owns a pixel, so that no reduction crosses lanes.

Classes are H W apart in memory and pixels are neighbours. A program takes a run of pixels of one image and walks over
the classes: loads coalesce along the pixels, and maximum and sum are private to each lane. The backward has no walk at
all: with the saved log-sum-exp every (pixels, classes) tile stands for itself. Ignored pixels write zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_2d_spatial",
    "family": "loss_ce",
    "op": "cross_entropy_2d",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "elementwise", "masking"),
    "saves": ("lse: fp32 (N, H, W)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pixel_ce_fwd(Logits, Target, Loss, Lse, C, S, ignore, BLOCK_S: tl.constexpr, UNROLL: tl.constexpr):
    image = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = s < S
    target = tl.load(Target + image * S + s, mask=inside, other=ignore)
    x_at = Logits + image * C * S + s
    top = tl.full((BLOCK_S,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_S,), tl.float32)
    for first in range(0, C, UNROLL):
        # UNROLL loads are in flight before the chain of maxima begins.
        for u in tl.static_range(UNROLL):
            x = tl.load(x_at + (first + u) * S, mask=inside & (first + u < C), other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, x)
            norm = norm * tl.exp(top - higher) + tl.exp(x - higher)
            top = higher
    lse = top + tl.log(norm)
    kept = inside & (target != ignore)
    picked = tl.load(x_at + target * S, mask=kept, other=0.0).to(tl.float32)
    tl.store(Lse + image * S + s, lse, mask=inside)
    tl.store(Loss + image * S + s, tl.where(kept, lse - picked, 0.0), mask=inside)


def forward(logits, target, ignore_index=255):
    logits, target = logits.contiguous(), target.contiguous()
    N, C, H, W = logits.shape
    loss, lse = (torch.empty(N, H, W, device=logits.device, dtype=torch.float32) for _ in range(2))
    BLOCK_S = max(32, min(256, triton.next_power_of_2(H * W)))
    _pixel_ce_fwd[(triton.cdiv(H * W, BLOCK_S), N)](
        logits, target, loss, lse, C, H * W, ignore_index, BLOCK_S=BLOCK_S, UNROLL=4, num_warps=2
    )
    return loss, (logits, target, lse, ignore_index)


# --- backward ---
@triton.jit
def _pixel_ce_bwd(
    DLoss, Logits, Target, Lse, DLogits, C, S, W, g_n, g_h, g_w, ignore, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr
):
    image = tl.program_id(2).to(tl.int64)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = s < S
    target = tl.load(Target + image * S + s, mask=inside, other=ignore)
    lse = tl.load(Lse + image * S + s, mask=inside, other=0.0)
    # The cotangent keeps its own layout: the pixel's row and column are taken apart once per tile.
    g_at = DLoss + image * g_n + (s // W).to(tl.int64) * g_h + (s % W).to(tl.int64) * g_w
    g = tl.load(g_at, mask=inside & (target != ignore), other=0.0)
    at = (image * C + c[:, None]) * S + s[None, :]
    live = (c[:, None] < C) & inside[None, :]
    p = tl.exp(tl.load(Logits + at, mask=live, other=0.0).to(tl.float32) - lse[None, :])
    onehot = tl.where(c[:, None] == target[None, :], 1.0, 0.0)
    tl.store(DLogits + at, g[None, :] * (p - onehot), mask=live)


def backward(saved, grad_loss, needs=None):
    logits, target, lse, ignore_index = saved
    N, C, H, W = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK_S = max(32, min(512, triton.next_power_of_2(H * W)))
    _pixel_ce_bwd[(triton.cdiv(H * W, BLOCK_S), triton.cdiv(C, 8), N)](
        grad_loss, logits, target, lse, dlogits, C, H * W, W, *grad_loss.stride(), ignore_index,
        BLOCK_S=BLOCK_S, BLOCK_C=8, num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"N": 2, "C": 16, "H": 8, "W": 16},
    {"N": 1, "C": 21, "H": 13, "W": 25},
    {"N": 2, "C": 5, "H": 9, "W": 10, "dtype": "bfloat16"},
    {"N": 1, "C": 11, "H": 6, "W": 30, "dtype": "float16"},
)
BENCH = ({"N": 8, "C": 21, "H": 512, "W": 512, "dtype": "bfloat16"},)


def make_args(N, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(N, C, H, W, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randint(0, C, (N, H, W), generator=g)
    target[:, ::3, ::2] = 255
    return logits, target.to(device)


def reference(logits, target, ignore_index=255):
    return torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")
