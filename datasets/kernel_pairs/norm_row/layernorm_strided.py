"""LayerNorm over a dimension that is not contiguous: explicit strides everywhere, dx in the layout of x, no copies.

In a transposed x neighbours in memory belong to neighbouring rows, so a program takes bands of rows and walks their
features in tiles whose lanes run along the band. A band is read twice in each direction; a program or two per processor
take one narrow band after another, so that what all of them hold between the two reads fits L2. A band's share of
dweight and dbias is a sum down each tile.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_strided",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("two-pass", "multi-row-tile", "two-stage-partials", "saved-statistics", "strided-cotangent"),
    "saves": ("mean: fp32 (M,)", "rstd: fp32 (M,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "192 bytes of a tile of 128 rows: on an H200 it takes 231 us, smaller tiles more",
}


# --- forward ---
@triton.jit
def _tile_at(base, m, n, stride_m, stride_n):
    """Pointers to rows m and columns n; offsets are 64-bit, for strides may be long in either direction."""
    return base + m[:, None].to(tl.int64) * stride_m + n[None, :].to(tl.int64) * stride_n


@triton.jit
def _ln_strided_fwd(
    X, W, B, Y, Mean, Rstd, M, N, x_m, x_n, y_m, y_n, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    lane = tl.arange(0, BLOCK_N)
    for band in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        m = band * BLOCK_M + tl.arange(0, BLOCK_M)
        # Moments about the row's first element.
        pivot = tl.load(X + m.to(tl.int64) * x_m, mask=m < M, other=0.0).to(tl.float32)[:, None]
        first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, N, BLOCK_N):
            n = start + lane
            ok = (m < M)[:, None] & (n < N)[None, :]
            x = tl.load(_tile_at(X, m, n, x_m, x_n), mask=ok, other=0.0).to(tl.float32)
            d = tl.where(ok, x - pivot, 0.0)
            first += d
            second += d * d
        shift = tl.sum(first, 1) / N
        var = tl.maximum(tl.sum(second, 1) / N - shift * shift, 0.0)
        rstd = tl.rsqrt(var + eps)
        mean = pivot + shift[:, None]
        tl.store((Mean + m)[:, None], mean, mask=(m < M)[:, None])
        tl.store(Rstd + m, rstd, mask=m < M)
        for start in range(0, N, BLOCK_N):
            n = start + lane
            ok = (m < M)[:, None] & (n < N)[None, :]
            x = tl.load(_tile_at(X, m, n, x_m, x_n), mask=ok, other=0.0).to(tl.float32)
            w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            tl.store(_tile_at(Y, m, n, y_m, y_n), (x - mean) * rstd[:, None] * w + b, mask=ok)


def _tile(x):
    """Lanes along the dimension whose neighbours are neighbours in memory: 32 rows of a transposed x, else columns."""
    wide = x.stride(0) < x.stride(1)
    return {"BLOCK_M": 32 if wide else 16, "BLOCK_N": 64 if wide else 128, "num_warps": 8}


def _bands(x, BLOCK_M):
    """Bands of rows, and programs that share them: two per processor."""
    bands = triton.cdiv(x.shape[0], BLOCK_M)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    return bands, min(bands, 2 * processors)


def forward(x, weight, bias, eps=1e-5):
    M, N = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    tile = _tile(x)
    _, programs = _bands(x, tile["BLOCK_M"])
    _ln_strided_fwd[(programs,)](x, weight, bias, y, mean, rstd, M, N, *x.stride(), *y.stride(), eps, **tile)
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _add_columns(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_strided_bwd(
    DY, X, W, Mean, Rstd, DX, Parts, M, N, dy_m, dy_n, x_m, x_n, dx_m, dx_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_N)
    for band in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        m = band * BLOCK_M + tl.arange(0, BLOCK_M)
        mean = tl.load(Mean + m, mask=m < M, other=0.0)[:, None]
        rstd = tl.load(Rstd + m, mask=m < M, other=0.0)[:, None]
        sum_gx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sum_g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # One program to a processor: copies run three tiles ahead of each walk.
        for start in tl.range(0, N, BLOCK_N, num_stages=4):
            n = start + lane
            ok = (m < M)[:, None] & (n < N)[None, :]
            xhat = (tl.load(_tile_at(X, m, n, x_m, x_n), mask=ok, other=0.0).to(tl.float32) - mean) * rstd
            dy = tl.load(_tile_at(DY, m, n, dy_m, dy_n), mask=ok, other=0.0).to(tl.float32)
            # The first read serves the parameters, too: rows outside the band have dy = 0.
            out = Parts + band.to(tl.int64) * 2 * N + n
            dw, db = tl.reduce((dy * xhat, dy), 0, _add_columns)
            tl.store(out, dw, mask=n < N)
            tl.store(out + N, db, mask=n < N)
            g = dy * tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            sum_gx += g * xhat
            sum_g += g
        slope = (tl.sum(sum_gx, 1) / N)[:, None]
        shift = (tl.sum(sum_g, 1) / N)[:, None]
        # Features backwards: the last of the first walk are the likeliest to be in L2.
        tiles = tl.cdiv(N, BLOCK_N)
        for tile in tl.range(tiles, num_stages=4):
            n = (tiles - 1 - tile) * BLOCK_N + lane
            ok = (m < M)[:, None] & (n < N)[None, :]
            xhat = (tl.load(_tile_at(X, m, n, x_m, x_n), mask=ok, other=0.0).to(tl.float32) - mean) * rstd
            dy = tl.load(_tile_at(DY, m, n, dy_m, dy_n), mask=ok, other=0.0).to(tl.float32)
            g = dy * tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            tl.store(_tile_at(DX, m, n, dx_m, dx_n), rstd * (g - shift - xhat * slope), mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    M, N = x.shape
    # For a dense x of any layout empty_like has its strides; for one with gaps, its order of dimensions.
    dx = torch.empty_like(x)
    # 64 rows of a transposed x are a line of memory; one band at a time on each processor is what L2 holds.
    wide = x.stride(0) < x.stride(1)
    tile = {"BLOCK_M": 128 if wide else 16, "BLOCK_N": 64 if wide else 256, "num_warps": 16}
    bands = triton.cdiv(M, tile["BLOCK_M"])
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs = min(bands, processors)
    parts = torch.empty(bands, 2, N, device=x.device, dtype=torch.float32)
    _ln_strided_bwd[(programs,)](
        grad_y, x, weight, mean, rstd, dx, parts, M, N, *grad_y.stride(), *x.stride(), *dx.stride(), **tile
    )
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"M": 128, "N": 64},
    {"M": 75, "N": 83, "dtype": "float16"},
    {"M": 40, "N": 90, "LAYOUT": "gaps"},
    {"M": 70, "N": 64, "dtype": "bfloat16"},
)
BENCH = ({"M": 32768, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, LAYOUT="transposed", dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    if LAYOUT == "transposed":
        x = torch.randn(N, M, generator=g).to(**to).t()
    elif LAYOUT == "gaps":
        x = torch.randn(M, 2 * N, generator=g).to(**to)[:, ::2]
    else:
        raise ValueError(f"LAYOUT is 'transposed' or 'gaps', not {LAYOUT!r}")
    return x, weight.to(**to), bias.to(**to)


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
