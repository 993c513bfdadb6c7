"""BatchNorm in training over NCHW, whose N*H*W elements of a channel are split over many programs in three stages.

Stage 1 sums chunks of a channel, stage 2 adds the chunks and turns them into per-channel coefficients, stage 3 is
elementwise. The backward has the same stages: the sums of dy and dy * xhat are dbias and dweight, and both enter dx.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "batchnorm_train_nchw_split",
    "family": "norm_channel",
    "op": "batch_norm",
    "schema": 1,
    "techniques": ("two-stage-partials", "two-pass", "saved-statistics"),
    "saves": ("mean: fp32 (C,)", "rstd: fp32 (C,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _plane_tile(tile, c, N, C, L, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Offsets and mask of tile number `tile` of channel c: BLOCK_N samples by BLOCK_L positions."""
    across = tl.cdiv(L, BLOCK_L)
    n = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tile % across * BLOCK_L + tl.arange(0, BLOCK_L)
    mask = (n[:, None] < N) & (at[None, :] < L)
    return (n[:, None].to(tl.int64) * C + c) * L + at[None, :], mask


@triton.jit
def _bn_chunk_moments(X, Parts, N, C, L, tiles, tiles_each, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    c = tl.program_id(0)
    chunk = tl.program_id(1)
    # Moments about the channel's first element: they add up over chunks, and a large common offset cancels exactly.
    pivot = tl.load(X + c.to(tl.int64) * L).to(tl.float32)
    first = tl.zeros((BLOCK_N, BLOCK_L), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_L), tl.float32)
    for tile in range(chunk * tiles_each, tl.minimum((chunk + 1) * tiles_each, tiles)):
        at, mask = _plane_tile(tile, c, N, C, L, BLOCK_N, BLOCK_L)
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, x - pivot, 0.0)
        first += d
        second += d * d
    tl.store(Parts + chunk * C + c, tl.sum(first))
    tl.store(Parts + (tl.num_programs(1) + chunk) * C + c, tl.sum(second))


@triton.jit
def _add_chunks(Parts, c, C, chunks, BLOCK_C: tl.constexpr):
    """Both partial sums of every channel, added over the chunks, 32 chunks at a time."""
    one = tl.zeros((32, BLOCK_C), tl.float32)
    two = tl.zeros((32, BLOCK_C), tl.float32)
    for start in range(0, chunks, 32):
        chunk = (start + tl.arange(0, 32))[:, None]
        ok = (chunk < chunks) & (c[None, :] < C)
        one += tl.load(Parts + chunk * C + c[None, :], mask=ok, other=0.0)
        two += tl.load(Parts + (chunks + chunk) * C + c[None, :], mask=ok, other=0.0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit
def _bn_finalise(X, Parts, Mean, Rstd, C, L, count, chunks, eps, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    first, second = _add_chunks(Parts, c, C, chunks, BLOCK_C)
    shift = first / count
    var = tl.maximum(second / count - shift * shift, 0.0)
    pivot = tl.load(X + c.to(tl.int64) * L, mask=ok, other=0.0).to(tl.float32)
    tl.store(Mean + c, pivot + shift, mask=ok)
    tl.store(Rstd + c, tl.rsqrt(var + eps), mask=ok)


@triton.jit
def _bn_apply(X, W, B, Mean, Rstd, Y, N, C, L, tiles, tiles_each, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    c = tl.program_id(0)
    chunk = tl.program_id(1)
    mean = tl.load(Mean + c)
    scale = tl.load(Rstd + c) * tl.load(W + c).to(tl.float32)
    b = tl.load(B + c).to(tl.float32)
    for tile in range(chunk * tiles_each, tl.minimum((chunk + 1) * tiles_each, tiles)):
        at, mask = _plane_tile(tile, c, N, C, L, BLOCK_N, BLOCK_L)
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + at, (x - mean) * scale + b, mask=mask)


def _schedule(N, C, L):
    """Block sizes, tiles of a channel, tiles of a chunk: planes are cut where long, and taken together where short."""
    block_l = min(512, triton.next_power_of_2(L))
    block_n = max(1, min(2048 // block_l, triton.next_power_of_2(N)))
    tiles = triton.cdiv(N, block_n) * triton.cdiv(L, block_l)
    # At most six programs for each of 132 processors, over all channels: one wave of the sums.
    tiles_each = triton.cdiv(tiles, max(1, min(tiles, 792 // C)))
    return {"BLOCK_N": block_n, "BLOCK_L": block_l}, tiles, tiles_each


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    N, C, H, W = x.shape
    L = H * W
    blocks, tiles, each = _schedule(N, C, L)
    chunks = triton.cdiv(tiles, each)
    parts = torch.empty(2, chunks, C, device=x.device, dtype=torch.float32)
    mean = torch.empty(C, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    y = torch.empty_like(x)
    _bn_chunk_moments[(C, chunks)](x, parts, N, C, L, tiles, each, **blocks)
    _bn_finalise[(triton.cdiv(C, 16),)](x, parts, mean, rstd, C, L, N * L, chunks, eps, BLOCK_C=16, num_warps=2)
    _bn_apply[(C, chunks)](x, weight, bias, mean, rstd, y, N, C, L, tiles, each, **blocks)
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _bn_chunk_sums(DY, X, Mean, Rstd, Parts, N, C, L, tiles, tiles_each, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    c = tl.program_id(0)
    chunk = tl.program_id(1)
    mean = tl.load(Mean + c)
    acc_w = tl.zeros((BLOCK_N, BLOCK_L), tl.float32)
    acc_b = tl.zeros((BLOCK_N, BLOCK_L), tl.float32)
    for tile in range(chunk * tiles_each, tl.minimum((chunk + 1) * tiles_each, tiles)):
        at, mask = _plane_tile(tile, c, N, C, L, BLOCK_N, BLOCK_L)
        dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        acc_w += dy * (x - mean)
        acc_b += dy
    tl.store(Parts + chunk * C + c, tl.sum(acc_w) * tl.load(Rstd + c))
    tl.store(Parts + (tl.num_programs(1) + chunk) * C + c, tl.sum(acc_b))


@triton.jit
def _bn_coefficients(Parts, W, Rstd, DW, DB, Coef, C, count, chunks, BLOCK_C: tl.constexpr):
    # dx = scale dy + slope (x - mean) + shift: the division by count and the products are done once for a channel.
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    dw, db = _add_chunks(Parts, c, C, chunks, BLOCK_C)
    tl.store(DW + c, dw, mask=ok)
    tl.store(DB + c, db, mask=ok)
    rstd = tl.load(Rstd + c, mask=ok, other=0.0)
    scale = tl.load(W + c, mask=ok, other=0.0).to(tl.float32) * rstd
    tl.store(Coef + c, scale, mask=ok)
    tl.store(Coef + C + c, -scale * rstd * dw / count, mask=ok)
    tl.store(Coef + 2 * C + c, -scale * db / count, mask=ok)


@triton.jit
def _bn_dx(DY, X, Mean, Coef, DX, N, C, L, tiles, tiles_each, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    c = tl.program_id(0)
    chunk = tl.program_id(1)
    mean = tl.load(Mean + c)
    scale = tl.load(Coef + c)
    slope = tl.load(Coef + C + c)
    shift = tl.load(Coef + 2 * C + c)
    for tile in range(chunk * tiles_each, tl.minimum((chunk + 1) * tiles_each, tiles)):
        at, mask = _plane_tile(tile, c, N, C, L, BLOCK_N, BLOCK_L)
        dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(DX + at, scale * dy + slope * (x - mean) + shift, mask=mask)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    N, C, H, W = x.shape
    L = H * W
    # Two stages read the cotangent by flat position in the plane, so other layouts are copied once.
    grad_y = grad_y.contiguous()
    blocks, tiles, each = _schedule(N, C, L)
    chunks = triton.cdiv(tiles, each)
    parts = torch.empty(2, chunks, C, device=x.device, dtype=torch.float32)
    coef = torch.empty(3, C, device=x.device, dtype=torch.float32)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    _bn_chunk_sums[(C, chunks)](grad_y, x, mean, rstd, parts, N, C, L, tiles, each, **blocks)
    _bn_coefficients[(triton.cdiv(C, 16),)](
        parts, weight, rstd, dweight, dbias, coef, C, N * L, chunks, BLOCK_C=16, num_warps=2
    )
    if needs is not None and not needs[0]:
        return None, dweight, dbias
    dx = torch.empty_like(x)
    _bn_dx[(C, chunks)](grad_y, x, mean, coef, dx, N, C, L, tiles, each, **blocks)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 4, "C": 6, "H": 8, "W": 8},
    {"N": 3, "C": 5, "H": 27, "W": 23, "dtype": "float16"},
    {"N": 9, "C": 4, "H": 7, "W": 7, "dtype": "bfloat16"},
)
BENCH = (
    {"N": 64, "C": 128, "H": 56, "W": 56, "dtype": "bfloat16"},
    {"N": 128, "C": 512, "H": 14, "W": 14, "dtype": "float32"},
)


def make_args(N, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, H, W, generator=g) * 0.8 + 0.5
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.batch_norm(x.float(), None, None, weight.float(), bias.float(), training=True, eps=eps)
    return y.to(x.dtype)
