"""BatchNorm in training, channels last: tiles of pixels by channels, column sums through partials, two launches each.

Channels are neighbours in memory, so a tile is summed down its rows without any exchange between lanes of a row. Each
program of the second launch adds the partial sums of its own channels before it starts, which saves the launch that
would do it. What that reads grows with the square of the programs, so they are few and large: two per processor.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "batchnorm_nhwc",
    "family": "norm_channel",
    "op": "batch_norm",
    "schema": 1,
    "techniques": ("two-stage-partials", "two-pass", "saved-statistics", "strided-cotangent"),
    "saves": ("mean: fp32 (C,)", "rstd: fp32 (C,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bn_last_moments(X, Means, Squares, R, C, rows_each, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1).to(tl.int64)
    first = split * rows_each
    last = tl.minimum(first + rows_each, R)
    # Every lane of the tile keeps its own running mean and centred squares (Welford); lanes meet after the loop.
    mean = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    m2 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    seen = tl.zeros((BLOCK_R, 1), tl.float32)
    for start in range(first, last, BLOCK_R):
        r = (start + tl.arange(0, BLOCK_R))[:, None]
        x = tl.load(X + r * C + c[None, :], mask=(r < last) & (c[None, :] < C), other=0.0).to(tl.float32)
        seen += (r < last).to(tl.float32)
        delta = tl.where(r < last, x - mean, 0.0)
        mean += delta / tl.maximum(seen, 1.0)
        m2 += tl.where(r < last, delta * (x - mean), 0.0)
    total = tl.sum(mean * seen, 0) / (last - first)
    away = mean - total[None, :]
    tl.store(Means + split * C + c, total, mask=c < C)
    tl.store(Squares + split * C + c, tl.sum(m2 + away * away * seen, 0), mask=c < C)


@triton.jit
def _bn_last_apply(
    X, W, B, Means, Squares, Y, Mean, Rstd, R, C, splits, rows_each, eps, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1).to(tl.int64)
    # Merge the splits, a tile of them at a time: first the mean of all, then their squares moved to it.
    weighted = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, splits, BLOCK_R):
        s = (start + tl.arange(0, BLOCK_R))[:, None]
        ok = (s < splits) & (c[None, :] < C)
        count = tl.minimum(rows_each, R - s * rows_each).to(tl.float32)
        weighted += tl.load(Means + s * C + c[None, :], mask=ok, other=0.0) * count
    mean = tl.sum(weighted, 0) / R
    m2 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, splits, BLOCK_R):
        s = (start + tl.arange(0, BLOCK_R))[:, None]
        ok = (s < splits) & (c[None, :] < C)
        count = tl.minimum(rows_each, R - s * rows_each).to(tl.float32)
        away = tl.load(Means + s * C + c[None, :], mask=ok, other=0.0) - mean[None, :]
        squares = tl.load(Squares + s * C + c[None, :], mask=ok, other=0.0)
        m2 += tl.where(ok, squares + count * away * away, 0.0)
    rstd = tl.rsqrt(tl.sum(m2, 0) / R + eps)
    if split == 0:
        tl.store(Mean + c, mean, mask=c < C)
        tl.store(Rstd + c, rstd, mask=c < C)
    scale = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32) * rstd
    b = tl.load(B + c, mask=c < C, other=0.0).to(tl.float32)
    first = split * rows_each
    last = tl.minimum(first + rows_each, R)
    for start in range(first, last, BLOCK_R):
        r = (start + tl.arange(0, BLOCK_R))[:, None]
        ok = (r < last) & (c[None, :] < C)
        x = tl.load(X + r * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(Y + r * C + c[None, :], (x - mean[None, :]) * scale[None, :] + b[None, :], mask=ok)


def _splits(R, C):
    """The launch's constants, column tiles, splits of the rows and rows of each."""
    block_c = min(64, max(8, triton.next_power_of_2(C)))
    block_r = max(16, min(4096 // block_c, triton.next_power_of_2(R) // 4))
    tiles = triton.cdiv(C, block_c)
    rows_each = triton.cdiv(triton.cdiv(R, max(1, 264 // tiles)), block_r) * block_r
    return {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": 8}, tiles, triton.cdiv(R, rows_each), rows_each


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    C = x.shape[-1]
    R = x.numel() // C
    blocks, tiles, splits, each = _splits(R, C)
    means = torch.empty(splits, C, device=x.device, dtype=torch.float32)
    squares = torch.empty_like(means)
    mean = torch.empty(C, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    y = torch.empty_like(x)
    _bn_last_moments[(tiles, splits)](x, means, squares, R, C, each, **blocks)
    _bn_last_apply[(tiles, splits)](x, weight, bias, means, squares, y, mean, rstd, R, C, splits, each, eps, **blocks)
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _bn_last_sums(
    DY, X, Mean, Rstd, PartsW, PartsB, R, C, dy_r, dy_c, rows_each, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1).to(tl.int64)
    last = tl.minimum((split + 1) * rows_each, R)
    mean = tl.load(Mean + c, mask=c < C, other=0.0)
    dw = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    db = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.range(split * rows_each, last, BLOCK_R, num_stages=3):
        r = (start + tl.arange(0, BLOCK_R))[:, None]
        ok = (r < last) & (c[None, :] < C)
        x = tl.load(X + r * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + r * dy_r + c[None, :] * dy_c, mask=ok, other=0.0).to(tl.float32)
        dw += dy * (x - mean[None, :])
        db += dy
    rstd = tl.load(Rstd + c, mask=c < C, other=0.0)
    tl.store(PartsW + split * C + c, tl.sum(dw, 0) * rstd, mask=c < C)
    tl.store(PartsB + split * C + c, tl.sum(db, 0), mask=c < C)


@triton.jit
def _bn_last_dx(
    DY, X, W, Mean, Rstd, PartsW, PartsB, DX, DW, DB, R, C, dy_r, dy_c, splits, rows_each,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1).to(tl.int64)
    all_w = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    all_b = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, splits, BLOCK_R):
        s = (start + tl.arange(0, BLOCK_R))[:, None]
        ok = (s < splits) & (c[None, :] < C)
        all_w += tl.load(PartsW + s * C + c[None, :], mask=ok, other=0.0)
        all_b += tl.load(PartsB + s * C + c[None, :], mask=ok, other=0.0)
    dw = tl.sum(all_w, 0)
    db = tl.sum(all_b, 0)
    if split == 0:
        tl.store(DW + c, dw, mask=c < C)
        tl.store(DB + c, db, mask=c < C)
    mean = tl.load(Mean + c, mask=c < C, other=0.0)
    rstd = tl.load(Rstd + c, mask=c < C, other=0.0)
    scale = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32) * rstd
    slope = (dw / R * rstd)[None, :]
    shift = (db / R)[None, :]
    last = tl.minimum((split + 1) * rows_each, R)
    for start in tl.range(split * rows_each, last, BLOCK_R, num_stages=3):
        r = (start + tl.arange(0, BLOCK_R))[:, None]
        ok = (r < last) & (c[None, :] < C)
        x = tl.load(X + r * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + r * dy_r + c[None, :] * dy_c, mask=ok, other=0.0).to(tl.float32)
        dx = scale[None, :] * (dy - shift - (x - mean[None, :]) * slope)
        tl.store(DX + r * C + c[None, :], dx, mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    C = x.shape[-1]
    R = x.numel() // C
    # A view wherever the pixels lie at even distances, else a copy.
    dy = grad_y.reshape(R, C)
    blocks, tiles, splits, each = _splits(R, C)
    dw_parts = torch.empty(splits, C, device=x.device, dtype=torch.float32)
    db_parts = torch.empty_like(dw_parts)
    dx = torch.empty_like(x)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    _bn_last_sums[(tiles, splits)](
        dy, x, mean, rstd, dw_parts, db_parts, R, C, dy.stride(0), dy.stride(1), each, **blocks
    )
    _bn_last_dx[(tiles, splits)](
        dy, x, weight, mean, rstd, dw_parts, db_parts, dx, dweight, dbias, R, C, dy.stride(0), dy.stride(1),
        splits, each, **blocks,
    )  # fmt: skip
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 2, "H": 8, "W": 8, "C": 32},
    {"N": 3, "H": 11, "W": 9, "C": 21, "dtype": "float16"},
    {"N": 2, "H": 6, "W": 7, "C": 70, "dtype": "bfloat16"},
    {"N": 1, "H": 65, "W": 64, "C": 33},  # more splits than a tile of them has rows
)
BENCH = ({"N": 64, "H": 56, "W": 56, "C": 128, "dtype": "bfloat16"},)


def make_args(N, H, W, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, H, W, C, generator=g) * 1.2 - 0.3
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    xf = x.float()
    centred = xf - xf.mean((0, 1, 2))
    rstd = torch.rsqrt(centred.pow(2).mean((0, 1, 2)) + eps)
    return (centred * rstd * weight.float() + bias.float()).to(x.dtype)
