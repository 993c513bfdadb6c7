"""GroupNorm, channels last: sums are taken by channel in coalesced tiles, groups are formed from those few numbers.

A group is a narrow strided stripe of the image. Instead of walking stripes, the first launch sums tiles of pixels by
channels down the pixels, the second combines the channels of each group, and the third is elementwise and looks its
channel's group up. The backward has the same three stages, and the first gives the shares of dweight and dbias.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "groupnorm_nhwc",
    "family": "norm_channel",
    "op": "group_norm",
    "schema": 1,
    "techniques": ("two-stage-partials", "two-pass", "saved-statistics", "strided-cotangent"),
    "saves": ("stats: fp32 (N, G, 2)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _channel_moments(X, Parts, L, C, rows_each, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    # Moments about each channel's first pixel.
    pivot = tl.load(X + n * L * C + c, mask=c < C, other=0.0).to(tl.float32)
    s1 = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    s2 = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    last = tl.minimum((split + 1) * rows_each, L)
    for start in range(split * rows_each, last, BLOCK_L):
        p = start + tl.arange(0, BLOCK_L)
        ok = (p[:, None] < last) & (c[None, :] < C)
        x = tl.load(X + (n * L + p[:, None]) * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        d = tl.where(ok, x - pivot[None, :], 0.0)
        s1 += d
        s2 += d * d
    out = Parts + ((n * tl.num_programs(1) + split) * 2) * C + c
    tl.store(out, tl.sum(s1, 0), mask=c < C)
    tl.store(out + C, tl.sum(s2, 0), mask=c < C)


@triton.jit
def _add_splits(Parts, n, c, ok, C, splits, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr):
    """The two partial sums of channels c of sample n, added over the splits."""
    one = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    two = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    for start in range(0, splits, BLOCK_S):
        s = (start + tl.arange(0, BLOCK_S))[:, None]
        at = Parts + ((n * splits + s) * 2) * C + c[None, :]
        one += tl.load(at, mask=(s < splits) & ok[None, :], other=0.0)
        two += tl.load(at + C, mask=(s < splits) & ok[None, :], other=0.0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit
def _group_stats(X, Parts, Stats, L, C, G, K, splits, eps, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr):
    g = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    c = g * K + k
    s1, s2 = _add_splits(Parts, n, c, k < K, C, splits, BLOCK_S, BLOCK_K)
    pivot = tl.load(X + n * L * C + c, mask=k < K, other=0.0).to(tl.float32)
    # Channels are equally long, so the group's mean is the mean of theirs.
    means = pivot + s1 / L
    mean = tl.sum(means, 0) / K
    away = tl.where(k < K, means - mean, 0.0)
    within = tl.maximum(s2 / L - (s1 / L) * (s1 / L), 0.0)
    var = tl.sum(within + away * away, 0) / K
    tl.store(Stats + (n * G + g) * 2, mean)
    tl.store(Stats + (n * G + g) * 2 + 1, tl.rsqrt(var + eps))


@triton.jit
def _gn_last_apply(X, W, B, Stats, Y, L, C, G, K, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    n = tl.program_id(2).to(tl.int64)
    ok = (p[:, None] < L) & (c[None, :] < C)
    at = (n * L + p[:, None]) * C + c[None, :]
    group = Stats + (n * G + c // K) * 2
    mean = tl.load(group, mask=c < C, other=0.0)
    scale = tl.load(group + 1, mask=c < C, other=0.0) * tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
    b = tl.load(B + c, mask=c < C, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + at, (x - mean[None, :]) * scale[None, :] + b[None, :], mask=ok)


def _schedule(N, L, C):
    """Block sizes, column tiles, splits of a sample's pixels, pixels of each."""
    block_c = min(128, max(8, triton.next_power_of_2(C)))
    block_l = 2048 // block_c
    tiles = triton.cdiv(C, block_c)
    rows_each = triton.cdiv(triton.cdiv(L, max(1, 792 // (N * tiles))), block_l) * block_l
    return {"BLOCK_L": block_l, "BLOCK_C": block_c}, tiles, triton.cdiv(L, rows_each), rows_each


def forward(x, weight, bias, groups, eps=1e-5):
    x = x.contiguous()
    N, H, W, C = x.shape
    L, K = H * W, C // groups
    blocks, tiles, splits, each = _schedule(N, L, C)
    parts = torch.empty(N, splits, 2, C, device=x.device, dtype=torch.float32)
    stats = torch.empty(N, groups, 2, device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    _channel_moments[(tiles, splits, N)](x, parts, L, C, each, **blocks)
    _group_stats[(groups, N)](
        x, parts, stats, L, C, groups, K, splits, eps, BLOCK_S=16, BLOCK_K=triton.next_power_of_2(K), num_warps=2
    )
    grid = (tiles, triton.cdiv(L, blocks["BLOCK_L"]), N)
    _gn_last_apply[grid](x, weight, bias, stats, y, L, C, groups, K, **blocks)
    return y, (x, weight, stats)


# --- backward ---
@triton.jit
def _channel_sums(
    DY, X, Stats, Parts, L, C, G, K, dy_n, dy_l, dy_c, rows_each, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    group = Stats + (n * G + c // K) * 2
    mean = tl.load(group, mask=c < C, other=0.0)
    rstd = tl.load(group + 1, mask=c < C, other=0.0)
    gx = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    gs = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    last = tl.minimum((split + 1) * rows_each, L)
    for start in tl.range(split * rows_each, last, BLOCK_L, num_stages=3):
        p = start + tl.arange(0, BLOCK_L)
        ok = (p[:, None] < last) & (c[None, :] < C)
        x = tl.load(X + (n * L + p[:, None]) * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        dy_at = n * dy_n + p[:, None].to(tl.int64) * dy_l + c[None, :].to(tl.int64) * dy_c
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        gx += dy * (x - mean[None, :])
        gs += dy
    out = Parts + ((n * tl.num_programs(1) + split) * 2) * C + c
    tl.store(out, tl.sum(gx, 0) * rstd, mask=c < C)
    tl.store(out + C, tl.sum(gs, 0), mask=c < C)


@triton.jit
def _group_sums(
    Parts, W, Shares, Sums, L, C, G, K, splits, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    g = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    c = g * K + k
    dw, db = _add_splits(Parts, n, c, k < K, C, splits, BLOCK_S, BLOCK_K)
    tl.store(Shares + n * 2 * C + c, dw, mask=k < K)
    tl.store(Shares + n * 2 * C + C + c, db, mask=k < K)
    w = tl.load(W + c, mask=k < K, other=0.0).to(tl.float32)
    tl.store(Sums + (n * G + g) * 2, tl.sum(w * dw, 0) / (K * L))
    tl.store(Sums + (n * G + g) * 2 + 1, tl.sum(w * db, 0) / (K * L))


@triton.jit
def _gn_last_dx(
    DY, X, W, Stats, Sums, DX, L, C, G, K, dy_n, dy_l, dy_c, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    # Samples in the opposite order: the last that the first launch read are in L2.
    n = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    ok = (p[:, None] < L) & (c[None, :] < C)
    group = (n * G + c // K) * 2
    mean = tl.load(Stats + group, mask=c < C, other=0.0)
    rstd = tl.load(Stats + group + 1, mask=c < C, other=0.0)
    slope = tl.load(Sums + group, mask=c < C, other=0.0) * rstd
    shift = tl.load(Sums + group + 1, mask=c < C, other=0.0)
    w = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32)
    at = (n * L + p[:, None]) * C + c[None, :]
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    dy_at = n * dy_n + p[:, None].to(tl.int64) * dy_l + c[None, :].to(tl.int64) * dy_c
    dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
    dx = rstd[None, :] * (dy * w[None, :] - shift[None, :] - (x - mean[None, :]) * slope[None, :])
    tl.store(DX + at, dx, mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, stats = saved
    N, H, W, C = x.shape
    L, G = H * W, stats.shape[1]
    K = C // G
    # A view wherever the pixels of a sample lie at one distance, else a copy.
    dy = grad_y.flatten(1, 2)
    blocks, tiles, splits, each = _schedule(N, L, C)
    parts = torch.empty(N, splits, 2, C, device=x.device, dtype=torch.float32)
    shares = torch.empty(N, 2, C, device=x.device, dtype=torch.float32)
    sums = torch.empty(N, G, 2, device=x.device, dtype=torch.float32)
    dx = torch.empty_like(x)
    _channel_sums[(tiles, splits, N)](dy, x, stats, parts, L, C, G, K, *dy.stride(), each, **blocks, num_warps=2)
    _group_sums[(G, N)](
        parts, weight, shares, sums, L, C, G, K, splits, BLOCK_S=16, BLOCK_K=triton.next_power_of_2(K), num_warps=2
    )
    grid = (tiles, triton.cdiv(L, blocks["BLOCK_L"]), N)
    _gn_last_dx[grid](dy, x, weight, stats, sums, dx, L, C, G, K, *dy.stride(), **blocks)
    dweight, dbias = shares.sum(0).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 2, "H": 8, "W": 8, "G": 4, "K": 4},
    {"N": 2, "H": 13, "W": 11, "G": 3, "K": 5, "dtype": "float16"},
    {"N": 3, "H": 6, "W": 5, "G": 2, "K": 8, "dtype": "bfloat16"},
)
BENCH = ({"N": 64, "H": 64, "W": 64, "G": 32, "K": 10, "dtype": "bfloat16"},)


def make_args(N, H, W, G, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    C = G * K
    x = torch.randn(N, H, W, C, generator=g) * 1.4 + 0.6
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias)), G)


def reference(x, weight, bias, groups, eps=1e-5):
    first = x.float().permute(0, 3, 1, 2)
    y = torch.nn.functional.group_norm(first, groups, weight.float(), bias.float(), eps)
    return y.permute(0, 2, 3, 1).contiguous().to(x.dtype)
