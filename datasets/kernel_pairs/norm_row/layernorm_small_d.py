"""LayerNorm of millions of short vectors (16 to 64 features): a program is a tile of a hundred rows and more.

Row sums are reductions along axis 1 within a few threads, the shares of dweight and dbias reductions along axis 0. Each
band of tiles stores one partial row of both; a second launch adds them, many partial rows to a program, by one atomic
each.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_small_d",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("multi-row-tile", "two-stage-partials", "atomics", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _short_ln_fwd(X, W, B, Y, R, D, eps, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    at = r[:, None] * D + d[None, :]
    ok = (r[:, None] < R) & (d[None, :] < D)
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    gain = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)
    shift = tl.load(B + d, mask=d < D, other=0.0).to(tl.float32)
    xc = tl.where(ok, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    xhat = xc * tl.rsqrt(tl.sum(xc * xc, 1) / D + eps)[:, None]
    tl.store(Y + at, xhat * gain[None, :] + shift[None, :], mask=ok)


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    D = x.shape[-1]
    R = x.numel() // D
    y = torch.empty_like(x)
    BLOCK_D = triton.next_power_of_2(D)
    ROWS = max(1, 4096 // BLOCK_D)
    _short_ln_fwd[(triton.cdiv(R, ROWS),)](x, weight, bias, y, R, D, eps, ROWS=ROWS, BLOCK_D=BLOCK_D, num_warps=4)
    return y, (x, weight, eps)


# --- backward ---
@triton.jit
def _add_four(a0, b0, c0, d0, a1, b1, c1, d1):
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1


@triton.jit
def _short_ln_bwd(DY, X, W, DX, Parts, R, D, dy_r, dy_d, eps, tiles_each, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    band = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    gain = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK_D), tl.float32)
    db = tl.zeros((ROWS, BLOCK_D), tl.float32)
    # Two tiles ahead are copied while this one is reduced; column sums stay with their lanes until the band ends.
    for tile in tl.range(tiles_each, num_stages=3):
        r = (band * tiles_each + tile) * ROWS + tl.arange(0, ROWS)
        at = r[:, None] * D + d[None, :]
        ok = (r[:, None] < R) & (d[None, :] < D)
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + r[:, None] * dy_r + d[None, :] * dy_d, mask=ok, other=0.0).to(tl.float32)
        # Moments about the row's first element: all four sums of a row are one reduction, and nothing cancels.
        pivot = tl.sum(tl.where(d[None, :] == 0, x, 0.0), 1, keep_dims=True)
        away = tl.where(ok, x - pivot, 0.0)
        g = dy * gain
        first, second, g_sum, g_away = tl.reduce((away, away * away, g, g * away), 1, _add_four, keep_dims=True)
        mean = first / D
        rstd = tl.rsqrt(tl.maximum(second / D - mean * mean, 0.0) + eps)
        xhat = tl.where(ok, (away - mean) * rstd, 0.0)
        slope = (g_away - mean * g_sum) * rstd / D
        tl.store(DX + at, rstd * (g - g_sum / D - xhat * slope), mask=ok)
        dw += dy * xhat
        db += dy
    tl.store(Parts + band * 2 * D + d, tl.sum(dw, 0), mask=d < D)
    tl.store(Parts + band * 2 * D + D + d, tl.sum(db, 0), mask=d < D)


@triton.jit
def _add_tiles(Parts, Sums, tiles, width, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr):
    # Columns are few, so the bands are split over programs instead, and those meet by atomics: one for 64 bands.
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = (t[:, None] < tiles) & (c[None, :] < width)
    parts = tl.load(Parts + t[:, None] * width + c[None, :], mask=ok, other=0.0)
    tl.atomic_add(Sums + c, tl.sum(parts, 0), mask=c < width, sem="relaxed")


def backward(saved, grad_y, needs=None):
    x, weight, eps = saved
    D = x.shape[-1]
    R = x.numel() // D
    # A view wherever the vectors lie at even distances, else a copy.
    dy = grad_y.reshape(R, D)
    BLOCK_D = triton.next_power_of_2(D)
    ROWS = max(1, 2048 // BLOCK_D)
    # Four programs of four warps for each of 132 processors.
    tiles_each = max(2, triton.cdiv(triton.cdiv(R, ROWS), 4 * 132))
    tiles = triton.cdiv(R, ROWS * tiles_each)
    dx = torch.empty_like(x)
    parts = torch.empty(tiles, 2, D, device=x.device, dtype=torch.float32)
    _short_ln_bwd[(tiles,)](
        dy, x, weight, dx, parts, R, D, dy.stride(0), dy.stride(1), eps, tiles_each,
        ROWS=ROWS, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    if needs is not None and not (needs[1] or needs[2]):
        return dx, None, None
    sums = torch.zeros(2, D, device=x.device, dtype=torch.float32)
    _add_tiles[(triton.cdiv(tiles, 64), triton.cdiv(2 * D, 32))](parts, sums, tiles, 2 * D, BLOCK_T=64, BLOCK=32)
    dweight, dbias = sums.to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"B": 2, "S": 150, "D": 32},
    {"B": 3, "S": 59, "D": 41, "dtype": "float16"},
    {"B": 1, "S": 300, "D": 16, "dtype": "bfloat16"},
    {"B": 2, "S": 521, "D": 129},  # bands for two programs that add them
)
BENCH = ({"B": 64, "S": 16384, "D": 32, "dtype": "bfloat16"}, {"B": 64, "S": 8192, "D": 64, "dtype": "bfloat16"})


def make_args(B, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, S, D, generator=g), torch.rand(D, generator=g) + 0.5, torch.randn(D, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
