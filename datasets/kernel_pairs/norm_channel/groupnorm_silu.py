"""GroupNorm and SiLU in one operator: the pre-activation is rebuilt from x, the statistics and the affine pair.

Programs own planes (sample, channel) in both launches of each direction. The first leaves two sums of its plane; in the
backward these are sums of g and g * xhat with g = dy * silu'(a), the sample's share of dbias and dweight. In the second
every plane adds up the weighted sums of the planes of its group, a handful of neighbours, and writes dx.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "groupnorm_silu",
    "family": "norm_channel",
    "op": "group_norm_silu",
    "schema": 1,
    "techniques": ("recompute", "two-pass", "two-stage-partials", "saved-statistics"),
    "saves": ("stats: fp32 (N, G, 2)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _plane_pivoted(X, Moments, L, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    base = X + plane.to(tl.int64) * L
    pivot = tl.load(base).to(tl.float32)
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, L, BLOCK):
        at = start + tl.arange(0, BLOCK)
        d = tl.where(at < L, tl.load(base + at, mask=at < L, other=0.0).to(tl.float32) - pivot, 0.0)
        s1 += d
        s2 += d * d
    shift = tl.sum(s1, 0) / L
    tl.store(Moments + 2 * plane, pivot + shift)
    tl.store(Moments + 2 * plane + 1, tl.maximum(tl.sum(s2, 0) / L - shift * shift, 0.0))


@triton.jit
def _gn_silu_fwd(X, W, B, Moments, Y, Stats, C, G, K, L, eps, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    c = plane % C
    g = c // K
    n = plane // C
    # Planes are equally long: mean of means, and mean of variances plus the variance of means.
    k = tl.arange(0, BLOCK_K)
    mine = Moments + 2 * (n * C + g * K + k)
    means = tl.load(mine, mask=k < K, other=0.0)
    mean = tl.sum(means, 0) / K
    away = tl.where(k < K, means - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.load(mine + 1, mask=k < K, other=0.0) + away * away, 0) / K + eps)
    if c % K == 0:
        tl.store(Stats + 2 * (n * G + g), mean)
        tl.store(Stats + 2 * (n * G + g) + 1, rstd)
    scale = tl.load(W + c).to(tl.float32) * rstd
    b = tl.load(B + c).to(tl.float32)
    base = plane.to(tl.int64) * L
    for start in range(0, L, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = (tl.load(X + base + at, mask=at < L, other=0.0).to(tl.float32) - mean) * scale + b
        tl.store(Y + base + at, a * tl.sigmoid(a), mask=at < L)


def _blocks(L):
    block = min(4096, triton.next_power_of_2(L))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def forward(x, weight, bias, groups, eps=1e-5):
    x = x.contiguous()
    N, C, H, W = x.shape
    K, L = C // groups, H * W
    moments = torch.empty(N, C, 2, device=x.device, dtype=torch.float32)
    stats = torch.empty(N, groups, 2, device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    _plane_pivoted[(N * C,)](x, moments, L, **_blocks(L))
    _gn_silu_fwd[(N * C,)](
        x, weight, bias, moments, y, stats, C, groups, K, L, eps, BLOCK_K=triton.next_power_of_2(K), **_blocks(L)
    )
    return y, (x, weight, bias, stats)


# --- backward ---
@triton.jit
def _through_silu(dy, xhat, w, b):
    """dy times silu'(a) at a = xhat * w + b."""
    a = xhat * w + b
    s = tl.sigmoid(a)
    return dy * s * (1.0 + a * (1.0 - s))


@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _gn_silu_sums(DY, X, W, B, Stats, Shares, C, G, K, L, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    c = plane % C
    group = Stats + 2 * (plane // C * G + c // K)
    mean = tl.load(group)
    rstd = tl.load(group + 1)
    w = tl.load(W + c).to(tl.float32)
    b = tl.load(B + c).to(tl.float32)
    base = plane.to(tl.int64) * L
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, L, BLOCK, num_stages=2):
        at = start + tl.arange(0, BLOCK)
        xhat = (tl.load(X + base + at, mask=at < L, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(DY + base + at, mask=at < L, other=0.0).to(tl.float32)
        g = _through_silu(dy, xhat, w, b)
        dw += g * xhat
        db += g
    share_w, share_b = tl.reduce((dw, db), 0, _add_both)
    tl.store(Shares + 2 * plane, share_w)
    tl.store(Shares + 2 * plane + 1, share_b)


@triton.jit
def _gn_silu_dx(DY, X, W, B, Stats, Shares, DX, C, G, K, L, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):
    # The last plane first: L2 still holds what the first launch read at its end.
    plane = tl.num_programs(0) - 1 - tl.program_id(0)
    c = plane % C
    n = plane // C
    k = tl.arange(0, BLOCK_K)
    channels = c // K * K + k
    weights = tl.load(W + channels, mask=k < K, other=0.0).to(tl.float32)
    shares = Shares + 2 * (n * C + channels)
    slope = tl.sum(weights * tl.load(shares, mask=k < K, other=0.0), 0) / (K * L)
    shift = tl.sum(weights * tl.load(shares + 1, mask=k < K, other=0.0), 0) / (K * L)
    group = Stats + 2 * (n * G + c // K)
    mean = tl.load(group)
    rstd = tl.load(group + 1)
    w = tl.load(W + c).to(tl.float32)
    b = tl.load(B + c).to(tl.float32)
    base = plane.to(tl.int64) * L
    for start in range(0, L, BLOCK):
        at = start + tl.arange(0, BLOCK)
        xhat = (tl.load(X + base + at, mask=at < L, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(DY + base + at, mask=at < L, other=0.0).to(tl.float32)
        g = _through_silu(dy, xhat, w, b)
        tl.store(DX + base + at, rstd * (g * w - shift - xhat * slope), mask=at < L)


def backward(saved, grad_y, needs=None):
    x, weight, bias, stats = saved
    N, C, H, W = x.shape
    G, L = stats.shape[1], H * W
    K = C // G
    # Two launches read the cotangent by flat position in the plane, so other layouts are copied once.
    grad_y = grad_y.contiguous()
    shares = torch.empty(N, C, 2, device=x.device, dtype=torch.float32)
    _gn_silu_sums[(N * C,)](grad_y, x, weight, bias, stats, shares, C, G, K, L, **_blocks(L))
    dx = None
    if needs is None or needs[0]:
        dx = torch.empty_like(x)
        _gn_silu_dx[(N * C,)](
            grad_y, x, weight, bias, stats, shares, dx, C, G, K, L, BLOCK_K=triton.next_power_of_2(K), **_blocks(L)
        )
    sums = shares.sum(0).to(weight.dtype)
    return dx, sums[:, 0], sums[:, 1]


# --- check ---
SWEEP = (
    {"N": 2, "G": 2, "K": 4, "H": 8, "W": 8},
    {"N": 2, "G": 3, "K": 3, "H": 11, "W": 9, "dtype": "float16"},
    {"N": 3, "G": 2, "K": 2, "H": 7, "W": 7, "dtype": "bfloat16"},
)
BENCH = ({"N": 64, "G": 32, "K": 10, "H": 64, "W": 64, "dtype": "bfloat16"},)


def make_args(N, G, K, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    C = G * K
    x = torch.randn(N, C, H, W, generator=g) * 1.5 + 0.5
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias)), G)


def reference(x, weight, bias, groups, eps=1e-5):
    a = torch.nn.functional.group_norm(x.float(), groups, weight.float(), bias.float(), eps)
    return torch.nn.functional.silu(a).to(x.dtype)
