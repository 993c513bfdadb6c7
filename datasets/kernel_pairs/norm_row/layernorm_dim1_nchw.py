"""LayerNorm over the channels of (N, C, H, W): the reduced axis is strided, so a tile is channels by pixels.

Loads coalesce along the pixels while sums run along the channels. A program of the backward owns a line of pixels and
walks its channels twice: statistics and the sums that dx needs on the first walk, lane by lane, with one reduction at
its end; dx on the second, with the line's share of dweight and dbias.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_dim1_nchw",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("two-pass", "two-stage-partials", "recompute", "strided-cotangent"),
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
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_channels_bwd(DY, X, W, DX, Parts, C, S, dy_n, dy_c, dy_s, eps, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    n = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    lane = tl.arange(0, BLOCK_C)[:, None]
    x_at = X + n * C * S + s
    dy_at = DY + n * dy_n + s.to(tl.int64) * dy_s
    # Moments about the pixel's first channel: nothing cancels, and the sums that dx needs are taken on the same walk.
    pivot = tl.load(x_at, mask=s < S, other=0.0).to(tl.float32)
    first = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    second = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    g_sum = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    g_away = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for start in tl.range(0, C, BLOCK_C, num_stages=4):
        c = start + lane
        ok = (c < C) & (s < S)
        x = tl.load(x_at + c * S, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_at + c.to(tl.int64) * dy_c, mask=ok, other=0.0).to(tl.float32)
        away = tl.where(ok, x - pivot, 0.0)
        g = dy * tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
        first += away
        second += away * away
        g_sum += g
        g_away += g * away
    first, second, g_sum, g_away = tl.reduce((first, second, g_sum, g_away), 0, _add_fours, keep_dims=True)
    shift = first / C
    rstd = tl.rsqrt(tl.maximum(second / C - shift * shift, 0.0) + eps)
    mean = pivot + shift
    slope = (g_away - shift * g_sum) * rstd / C
    level = g_sum / C
    parts = Parts + (n * tl.num_programs(0) + tl.program_id(0)) * 2 * C
    # The last channels first: they are in the cache.
    last = (tl.cdiv(C, BLOCK_C) - 1) * BLOCK_C
    for back in tl.range(0, C, BLOCK_C, num_stages=4):
        c = last - back + lane
        ok = (c < C) & (s < S)
        x = tl.load(x_at + c * S, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_at + c.to(tl.int64) * dy_c, mask=ok, other=0.0).to(tl.float32)
        # dy is zero outside the tile: xhat may be anything finite there.
        xhat = (x - mean) * rstd
        g = dy * tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
        tl.store(DX + n * C * S + c * S + s, rstd * (g - level - xhat * slope), mask=ok)
        dw, db = tl.reduce((dy * xhat, dy), 1, _add_both, keep_dims=True)
        tl.store(parts + c, dw, mask=c < C)
        tl.store(parts + C + c, db, mask=c < C)


def backward(saved, grad_y, needs=None):
    x, weight, eps = saved
    N, C, H, W = x.shape
    S = H * W
    dy = grad_y.flatten(2)
    # A line of 64 pixels: few enough that L2 holds what the tiles under way read until their second walk.
    block_s = max(16, min(64, triton.next_power_of_2(S)))
    block_c = min(32, triton.next_power_of_2(C))
    across = triton.cdiv(S, block_s)
    dx = torch.empty_like(x)
    parts = torch.empty(N * across, 2, C, device=x.device, dtype=torch.float32)
    _ln_channels_bwd[(across, N)](
        dy, x, weight, dx, parts, C, S, *dy.stride(), eps, BLOCK_C=block_c, BLOCK_S=block_s, num_warps=4
    )
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 2, "C": 16, "H": 8, "W": 8},
    {"N": 2, "C": 21, "H": 9, "W": 11, "dtype": "float16"},
    {"N": 3, "C": 24, "H": 7, "W": 7, "dtype": "bfloat16"},
)
BENCH = (
    {"N": 256, "C": 96, "H": 56, "W": 56, "dtype": "bfloat16"},
    {"N": 256, "C": 384, "H": 28, "W": 28, "dtype": "bfloat16"},
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
