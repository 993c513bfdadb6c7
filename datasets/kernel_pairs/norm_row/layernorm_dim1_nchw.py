"""LayerNorm over the channels of (N, C, H, W): the reduced axis is strided, so a tile is channels by pixels.

Loads coalesce along the pixels while sums run along the channels. A program walks pixel tiles in strides of the grid;
for dweight and dbias, sums over all samples and pixels, it keeps one number per channel and stores them once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_dim1_nchw",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("persistent-grid", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _channel_stats(x, ok, C, eps):
    """xhat and 1/std of every pixel (column) of a tile that is zero outside `ok`."""
    centred = tl.where(ok, x - tl.sum(x, 0, keep_dims=True) / C, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0, keep_dims=True) / C + eps)
    return centred * rstd, rstd


@triton.jit
def _ln_channels_fwd(X, W, B, Y, C, S, eps, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    c = tl.arange(0, BLOCK_C)[:, None]
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    at = tl.program_id(1).to(tl.int64) * C * S + c * S + s
    ok = (c < C) & (s < S)
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    xhat, _ = _channel_stats(x, ok, C, eps)
    w = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
    b = tl.load(B + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(Y + at, xhat * w + b, mask=ok)


def _tile(C):
    """All channels by 16 pixels (one sector of bf16) or more, 16 elements for each thread."""
    block_c = triton.next_power_of_2(C)
    block_s = max(16, min(64, 4096 // block_c))
    return {"BLOCK_C": block_c, "BLOCK_S": block_s, "num_warps": max(4, min(16, block_c * block_s // 512))}


def forward(x, weight, bias, eps=1e-6):
    x = x.contiguous()
    N, C, H, W = x.shape
    S = H * W
    y = torch.empty_like(x)
    tile = _tile(C)
    _ln_channels_fwd[(triton.cdiv(S, tile["BLOCK_S"]), N)](x, weight, bias, y, C, S, eps, **tile)
    return y, (x, weight, eps)


# --- backward ---
@triton.jit
def _add_fours(a0, b0, c0, d0, a1, b1, c1, d1):
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1


@triton.jit
def _ln_channels_bwd(DY, X, W, DX, Parts, N, C, S, dy_n, dy_c, dy_s, eps, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    c = tl.arange(0, BLOCK_C)[:, None]
    w = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_C, 1), tl.float32)
    db = tl.zeros((BLOCK_C, 1), tl.float32)
    across = tl.cdiv(S, BLOCK_S)
    # The next tile is copied while this one is reduced.
    for tile in tl.range(tl.program_id(0), N * across, tl.num_programs(0), num_stages=3):
        n = tl.cast(tile // across, tl.int64)
        s = tile % across * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
        at = n * C * S + c * S + s
        ok = (c < C) & (s < S)
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        dy_at = n * dy_n + c.to(tl.int64) * dy_c + s.to(tl.int64) * dy_s
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        # The pixel's channels are in registers: mean and 1/std cost less than two more tensors. About the pixel's first
        # channel nothing cancels, and the sums that dx needs join theirs in one reduction instead of three.
        pivot = tl.load(X + n * C * S + s, mask=s < S, other=0.0).to(tl.float32)
        away = tl.where(ok, x - pivot, 0.0)
        g = dy * w
        first, second, g_sum, g_away = tl.reduce((away, away * away, g, g * away), 0, _add_fours, keep_dims=True)
        mean = first / C
        rstd = tl.rsqrt(tl.maximum(second / C - mean * mean, 0.0) + eps)
        xhat = tl.where(ok, (away - mean) * rstd, 0.0)
        slope = (g_away - mean * g_sum) * rstd / C
        tl.store(DX + at, rstd * (g - g_sum / C - xhat * slope), mask=ok)
        # Pixels of a channel lie in few lanes: their sum is cheaper than registers that keep them apart.
        dw += tl.sum(dy * xhat, 1, keep_dims=True)
        db += tl.sum(dy, 1, keep_dims=True)
    out = Parts + tl.program_id(0) * 2 * C + c
    tl.store(out, dw, mask=c < C)
    tl.store(out + C, db, mask=c < C)


def backward(saved, grad_y, needs=None):
    x, weight, eps = saved
    N, C, H, W = x.shape
    S = H * W
    dy = grad_y.flatten(2)
    tile = _tile(C)
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    programs = min(132 * 16 // tile["num_warps"], N * triton.cdiv(S, tile["BLOCK_S"]))
    dx = torch.empty_like(x)
    parts = torch.empty(programs, 2, C, device=x.device, dtype=torch.float32)
    _ln_channels_bwd[(programs,)](dy, x, weight, dx, parts, N, C, S, *dy.stride(), eps, **tile)
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 2, "C": 16, "H": 8, "W": 8},
    {"N": 2, "C": 21, "H": 9, "W": 11, "dtype": "float16"},
    {"N": 3, "C": 24, "H": 7, "W": 7, "dtype": "bfloat16"},
)
BENCH = (
    {"N": 64, "C": 96, "H": 56, "W": 56, "dtype": "bfloat16"},
    {"N": 64, "C": 384, "H": 28, "W": 28, "dtype": "bfloat16"},
)


def make_args(N, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, H, W, generator=g) + 0.3
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-6):
    xf = x.float()
    centred = xf - xf.mean(1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + eps)
    return (normed * weight.float()[:, None, None] + bias.float()[:, None, None]).to(x.dtype)
