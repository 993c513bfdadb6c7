"""Bias and exact GELU: a row tile's share of dbias is stored as it is, and a second kernel adds the shares of a column.

Every program owns one tile of dx and nothing it does waits for another tile. The partials, one row for each row tile of
64, are 1/32 of dx in bytes at bf16; the second launch owns columns and walks them, so that no partial is read twice.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gelu_bias",
    "family": "activation",
    "op": "gelu",
    "schema": 1,
    "techniques": ("elementwise", "two-stage-partials", "column-owner", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bias_gelu_fwd(X, Bias, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < N
    u = tl.load(X + row * N + c, mask=inside, other=0.0).to(tl.float32)
    u += tl.load(Bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * N + c, 0.5 * u * (1.0 + tl.math.erf(u * 0.7071067811865476)), mask=inside)


def forward(x, bias):
    x, bias = x.contiguous(), bias.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK = max(64, min(1024, triton.next_power_of_2(N)))
    _bias_gelu_fwd[(M, triton.cdiv(N, BLOCK))](x, bias, y, N, BLOCK=BLOCK)
    return y, (x, bias)


# --- backward ---
@triton.jit
def _bias_gelu_bwd(
    DY, X, Bias, DX, Parts, M, N, dy_row, dy_col, TILE_M: tl.constexpr, SLICE: tl.constexpr, TILE_N: tl.constexpr
):
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    bias = tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    share = tl.zeros((SLICE, TILE_N), tl.float32)
    # The tile goes by in slices of a few rows: the next two are copied meanwhile, sums stay with their lanes.
    for start in tl.range(0, TILE_M, SLICE, num_stages=4):
        m = (tl.program_id(0).to(tl.int64) * TILE_M + start + tl.arange(0, SLICE))[:, None]
        mask = (m < M) & (n[None, :] < N)
        u = tl.load(X + m * N + n[None, :], mask=mask, other=0.0).to(tl.float32) + bias
        dy = tl.load(DY + m * dy_row + n[None, :].to(tl.int64) * dy_col, mask=mask, other=0.0).to(tl.float32)
        cdf = 0.5 + 0.5 * tl.math.erf(u * 0.7071067811865476)
        dx = dy * (cdf + u * 0.3989422804014327 * tl.exp(-0.5 * u * u))
        tl.store(DX + m * N + n[None, :], dx, mask=mask)
        # The gradient of a sum: dbias adds up dx itself, in fp32 and before it is rounded.
        share += dx
    tl.store(Parts + tl.program_id(0) * N + n, tl.sum(share, 0), mask=n < N)


@triton.jit
def _add_shares(Parts, DBias, tiles, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, tiles, ROWS):
        r = (start + tl.arange(0, ROWS))[:, None]
        total += tl.load(Parts + r * N + n[None, :], mask=(r < tiles) & (n[None, :] < N), other=0.0)
    tl.store(DBias + n, tl.sum(total, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, bias = saved
    M, N = x.shape
    TILE_M, TILE_N = 512, max(16, min(256, triton.next_power_of_2(N)))
    tiles = triton.cdiv(M, TILE_M)
    dx, dbias = torch.empty_like(x), torch.empty_like(bias)
    parts = torch.empty(tiles, N, device=x.device, dtype=torch.float32)
    _bias_gelu_bwd[(tiles, triton.cdiv(N, TILE_N))](
        grad_y, x, bias, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1),
        TILE_M=TILE_M, SLICE=min(64, 2048 // TILE_N), TILE_N=TILE_N, num_warps=4,
    )  # fmt: skip
    _add_shares[(triton.cdiv(N, 32),)](parts, dbias, tiles, N, ROWS=32, COLS=32)
    return dx, dbias


# --- check ---
SWEEP = ({"M": 128, "N": 64, "dtype": "float16"}, {"M": 141, "N": 75}, {"M": 80, "N": 64, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 8192, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(M, N, generator=g), torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, bias))


def reference(x, bias):
    return torch.nn.functional.gelu(x.float() + bias.float()).to(x.dtype)
