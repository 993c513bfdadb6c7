"""Group-wise weight quantisation whose scale follows the group's extremes: the scale's gradient goes back to them.

With v = (w - min) / s, s = (max - min) / levels and y = s * round(v) + min, the rounding is passed straight through:
dy/dw is one and dy/dmin is zero, which leaves dy/ds = round(v) - v. Its sum over the group, divided by the number of
levels, goes to the largest weight and, negated, to the smallest; equal extremes share it. A tile holds whole groups in
its rows, and nothing but the weights is saved.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "fakequant_group128_weight",
    "family": "quant",
    "op": "fake_quantize",
    "schema": 1,
    "techniques": ("straight-through", "argmax-routing", "multi-row-tile", "recompute"),
    "saves": (),
    "grads": ("weight",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _places(groups, K, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of this program's groups and which of them exist: the last group may be short."""
    g = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G))[:, None]
    lane = tl.arange(0, BLOCK_K)[None, :]
    k = g * GROUP + lane
    return k, (lane < GROUP) & (k < K) & (g < groups)


@triton.jit
def _extremes(w, mask):
    return (
        tl.min(tl.where(mask, w, float("inf")), 1, keep_dims=True),
        tl.max(tl.where(mask, w, -float("inf")), 1, keep_dims=True),
    )


@triton.jit
def _scaled(w, mask, low, high, levels):
    """The groups' scales and the unrounded levels of their weights. A group of equal weights has scale one."""
    spread = tl.where(high > low, high - low, levels)
    # Correctly rounded divisions: a tie must not hang on an approximate quotient.
    scale = tl.div_rn(spread, tl.broadcast_to(levels, spread.shape))
    return scale, tl.where(mask, tl.div_rn(w - low, tl.broadcast_to(scale, w.shape)), 0.0)


@triton.jit
def _group_quant_fwd(W, Y, groups, K, levels, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    k, mask = _places(groups, K, GROUP, BLOCK_G, BLOCK_K)
    w = tl.load(W + n * K + k, mask=mask, other=0.0).to(tl.float32)
    low, high = _extremes(w, mask)
    scale, v = _scaled(w, mask, low, high, levels)
    tl.store(Y + n * K + k, libdevice.rint(v) * scale + low, mask=mask)


def _tile(groups, group):
    """Groups in a tile of at most 2048 weights, and the tile's width."""
    BLOCK_K = triton.next_power_of_2(group)
    return max(1, min(triton.next_power_of_2(groups), 2048 // BLOCK_K)), BLOCK_K


def forward(weight, bits=4, group=128):
    weight = weight.contiguous()
    N, K = weight.shape
    levels = float((1 << bits) - 1)
    groups = triton.cdiv(K, group)
    y = torch.empty_like(weight)
    BLOCK_G, BLOCK_K = _tile(groups, group)
    _group_quant_fwd[(N, triton.cdiv(groups, BLOCK_G))](
        weight, y, groups, K, levels, GROUP=group, BLOCK_G=BLOCK_G, BLOCK_K=BLOCK_K
    )
    return y, (weight, levels, group)


# --- backward ---
@triton.jit
def _least_and_most(low0, high0, low1, high1):
    return tl.minimum(low0, low1), tl.maximum(high0, high1)


@triton.jit
def _add_three(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def _quotient(x, scale):
    """x / scale, correctly rounded as by the forward, with one division for a group: exact remainders correct twice."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    q = x * inverse
    q = tl.fma(tl.fma(-q, scale, x), inverse, q)
    return tl.fma(tl.fma(-q, scale, x), inverse, q)


@triton.jit
def _group_quant_bwd(
    DY, W, DW, groups, K, levels, dy_n, dy_k,
    GROUP: tl.constexpr, WHOLE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    k, mask = _places(groups, K, GROUP, BLOCK_G, BLOCK_K)
    if WHOLE:
        # Groups fill all tiles: a mask known here costs nothing below.
        mask = tl.full((BLOCK_G, BLOCK_K), True, tl.int1)
    w = tl.load(W + n * K + k, mask=mask, other=0.0).to(tl.float32)
    # Cotangents are fetched before anything waits; the five reductions of a group are two.
    dy = tl.load(DY + n * dy_n + k.to(tl.int64) * dy_k, mask=mask, other=0.0).to(tl.float32)
    lowest = tl.where(mask, w, float("inf"))
    highest = tl.where(mask, w, -float("inf"))
    low, high = tl.reduce((lowest, highest), 1, _least_and_most, keep_dims=True)
    spread = tl.where(high > low, high - low, levels)
    v = _quotient(w - low, tl.div_rn(spread, tl.broadcast_to(levels, spread.shape)))
    is_high = mask & (w == high)
    is_low = mask & (w == low)
    # Masked lanes have no cotangent.
    off = dy * (libdevice.rint(v) - v)
    parts = (off, is_high.to(tl.float32), is_low.to(tl.float32))
    d_scale, highs, lows = tl.reduce(parts, 1, _add_three, keep_dims=True)
    d_spread = d_scale / levels
    to_high = d_spread / tl.maximum(highs, 1.0)
    to_low = d_spread / tl.maximum(lows, 1.0)
    dw = dy + tl.where(is_high, to_high, 0.0) - tl.where(is_low, to_low, 0.0)
    tl.store(DW + n * K + k, dw, mask=mask)


def backward(saved, grad_y, needs=None):
    weight, levels, group = saved
    N, K = weight.shape
    groups = triton.cdiv(K, group)
    dw = torch.empty_like(weight)
    BLOCK_G, BLOCK_K = _tile(groups, group)
    whole = K % (BLOCK_G * BLOCK_K) == 0 and group == BLOCK_K
    _group_quant_bwd[(N, triton.cdiv(groups, BLOCK_G))](
        grad_y, weight, dw, groups, K, levels, grad_y.stride(0), grad_y.stride(1),
        GROUP=group, WHOLE=whole, BLOCK_G=BLOCK_G, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return dw


# --- check ---
SWEEP = (
    {"N": 6, "K": 256, "dtype": "float16"},
    {"N": 5, "K": 301, "group": 64},
    {"N": 4, "K": 384, "bits": 3, "dtype": "bfloat16"},
    {"N": 16, "K": 512, "bits": 5, "dtype": "bfloat16"},
)
BENCH = ({"N": 8192, "K": 8192, "dtype": "bfloat16"},)


def make_args(N, K, bits=4, group=128, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, K, generator=g).to(device=device, dtype=getattr(torch, dtype)), bits, group


def _quantised(weight, bits, group, rounded):
    N, K = weight.shape
    short = -K % group
    # Copies of the last weight change neither extreme of the group that they fill up.
    w = torch.cat((weight, weight[:, -1:].detach().expand(N, short)), 1).unflatten(1, (-1, group))
    real = (torch.arange(K + short, device=weight.device) < K).view(-1, group)
    low = w.masked_fill(~real, float("inf")).amin(-1, keepdim=True)
    high = w.masked_fill(~real, -float("inf")).amax(-1, keepdim=True)
    levels = (1 << bits) - 1
    scale = torch.where(high > low, high - low, levels) / levels
    return (rounded((w - low) / scale) * scale + low).flatten(1)[:, :K]


def reference(weight, bits=4, group=128):
    return _quantised(weight.float(), bits, group, torch.round).to(weight.dtype)


def surrogate(weight, bits=4, group=128):
    return _quantised(weight, bits, group, lambda v: v + (v.round() - v).detach())
