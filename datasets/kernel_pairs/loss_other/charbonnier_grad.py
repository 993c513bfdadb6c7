"""Charbonnier loss on the gradients of an image error: the backward is the adjoint of forward differences, as a gather.

With d = pred - target, gx[i, j] = d[i, j + 1] - d[i, j], gy[i, j] = d[i + 1, j] - d[i, j] (zero across the border):
    L = mean of r,  r = sqrt(gx^2 + gy^2 + eps^2),    with u = gx / r and v = gy / r,
    dL/dd[i, j] = (u[i, j - 1] + v[i - 1, j] - u[i, j] - v[i, j]) / count.
A pixel's gradient needs r at itself, at its left and at its upper neighbour. A program owns a band of rows and walks
down: the three values of d around a pixel come from the row before, and so does the upper neighbour's share, so that a
row costs three shifted reads instead of seven. Nothing is saved, and nobody adds to another's pixel.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "charbonnier_grad",
    "family": "loss_other",
    "op": "charbonnier_gradient_loss",
    "schema": 1,
    "techniques": ("halo", "gather-form", "recompute", "shared-gradient", "one-launch"),
    "saves": (),
    "grads": ("pred", "target"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _error_at(Pred, Target, i, j, H, W):
    """d[i, j] of one image, zero outside."""
    inside = (i >= 0) & (i < H) & (j >= 0) & (j < W)
    at = i * W + j
    p = tl.load(Pred + at, mask=inside, other=0.0).to(tl.float32)
    return p - tl.load(Target + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _charbonnier_fwd(Pred, Target, Parts, H, W, eps2, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    image = tl.program_id(2).to(tl.int64) * H * W
    i = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    j = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    here = _error_at(Pred + image, Target + image, i, j, H, W)
    gx = tl.where(j + 1 < W, _error_at(Pred + image, Target + image, i, j + 1, H, W) - here, 0.0)
    gy = tl.where(i + 1 < H, _error_at(Pred + image, Target + image, i + 1, j, H, W) - here, 0.0)
    r = tl.sqrt(gx * gx + gy * gy + eps2)
    total = tl.sum(tl.sum(tl.where((i < H) & (j < W), r, 0.0), 1), 0)
    tile = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(Parts + tile, total)


@triton.jit
def _charbonnier_mean(Parts, Loss, tiles, numel, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        total += tl.load(Parts + t, mask=t < tiles, other=0.0)
    tl.store(Loss, tl.sum(total, 0) / numel)


def _grid(pred):
    B, H, W = pred.shape
    BLOCK_W = max(16, min(128, triton.next_power_of_2(W)))
    BLOCK_H = min(1024 // BLOCK_W, max(8, triton.next_power_of_2(H)))
    return (triton.cdiv(W, BLOCK_W), triton.cdiv(H, BLOCK_H), B), BLOCK_H, BLOCK_W


def forward(pred, target, eps=1e-3):
    pred, target = pred.contiguous(), target.contiguous()
    _, H, W = pred.shape
    grid, BLOCK_H, BLOCK_W = _grid(pred)
    tiles = grid[0] * grid[1] * grid[2]
    parts = torch.empty(tiles, device=pred.device, dtype=torch.float32)
    loss = torch.empty((), device=pred.device, dtype=torch.float32)
    _charbonnier_fwd[grid](pred, target, parts, H, W, eps * eps, BLOCK_H=BLOCK_H, BLOCK_W=BLOCK_W, num_warps=4)
    _charbonnier_mean[(1,)](parts, loss, tiles, float(pred.numel()), BLOCK=1024, num_warps=8)
    return loss, (pred, target, eps)


# --- backward ---
@triton.jit
def _charbonnier_bwd(
    DLoss, Pred, Target, DPred, DTarget, H, W, eps2, numel,
    NEED_P: tl.constexpr, NEED_T: tl.constexpr, BAND: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64) * H * W
    first = tl.program_id(1) * BAND
    j = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    P = Pred + image
    T = Target + image
    scale = tl.load(DLoss) / numel
    # The band's halo: the vertical share of the row above, of which the band needs no more.
    here = _error_at(P, T, first, j, H, W)
    above = _error_at(P, T, first - 1, j, H, W)
    above_gx = tl.where(j + 1 < W, _error_at(P, T, first - 1, j + 1, H, W) - above, 0.0)
    above_gy = tl.where(first > 0, here - above, 0.0)
    from_above = above_gy * tl.rsqrt(above_gx * above_gx + above_gy * above_gy + eps2)
    left = _error_at(P, T, first, j - 1, H, W)
    right = _error_at(P, T, first, j + 1, H, W)
    # Row by row: what the next row shows to this one is its own d as well, and this row's share of it is carried on.
    for i in tl.range(first, tl.minimum(first + BAND, H), num_stages=3):
        below = _error_at(P, T, i + 1, j, H, W)
        below_left = _error_at(P, T, i + 1, j - 1, H, W)
        below_right = _error_at(P, T, i + 1, j + 1, H, W)
        # Differences across the border of the image are zero, which also drops neighbours that do not exist.
        gx = tl.where(j + 1 < W, right - here, 0.0)
        gy = tl.where(i + 1 < H, below - here, 0.0)
        left_gx = tl.where(j > 0, here - left, 0.0)
        left_gy = tl.where(i + 1 < H, below_left - left, 0.0)
        inverse = tl.rsqrt(gx * gx + gy * gy + eps2)
        from_left = left_gx * tl.rsqrt(left_gx * left_gx + left_gy * left_gy + eps2)
        dd = scale * (from_left + from_above - (gx + gy) * inverse)
        if NEED_P:
            tl.store(DPred + image + i * W + j, dd, mask=j < W)
        if NEED_T:
            tl.store(DTarget + image + i * W + j, -dd, mask=j < W)
        from_above = gy * inverse
        here = below
        left = below_left
        right = below_right


def backward(saved, grad_loss, needs=(True, True)):
    pred, target, eps = saved
    B, H, W = pred.shape
    dp = torch.empty_like(pred) if needs[0] else None
    dt = torch.empty_like(target) if needs[1] else None
    BLOCK_W = max(32, min(512, triton.next_power_of_2(W)))
    # A band begins with a row that is not its own: 32 rows make that a thirty-second of the work.
    BAND = 64
    _charbonnier_bwd[(triton.cdiv(W, BLOCK_W), triton.cdiv(H, BAND), B)](
        grad_loss, pred, target, dp, dt, H, W, eps * eps, float(pred.numel()),
        NEED_P=needs[0], NEED_T=needs[1], BAND=BAND, BLOCK_W=BLOCK_W, num_warps=max(1, BLOCK_W // 256),
    )  # fmt: skip
    return dp, dt


# --- check ---
SWEEP = (
    {"B": 2, "H": 16, "W": 16},
    {"B": 1, "H": 19, "W": 45},
    {"B": 2, "H": 9, "W": 140, "dtype": "bfloat16"},
    {"B": 1, "H": 33, "W": 20, "dtype": "float16"},
)
BENCH = ({"B": 48, "H": 1024, "W": 1024, "dtype": "float32"},)


def make_args(B, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    images = (torch.rand(B, H, W, generator=g) for _ in range(2))
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in images), 0.1)


def reference(pred, target, eps=1e-3):
    d = pred.float() - target.float()
    gx = torch.nn.functional.pad(d[:, :, 1:] - d[:, :, :-1], (0, 1))
    gy = torch.nn.functional.pad(d[:, 1:] - d[:, :-1], (0, 0, 0, 1))
    return torch.sqrt(gx.square() + gy.square() + eps * eps).mean()
