"""LayerNorm of rows too long for registers: the backward reads a band of rows twice, tile by tile.

The first pass sums dy w and dy w xhat for every row of the band, the second writes dx. In the second pass a tile also
holds all rows of the band for its columns, so their share of dweight and dbias is one column sum, stored and never
read back: no accumulator lives longer than its tile. The second pass runs from right to left, because the tiles that
were read last are the likeliest to be in the cache still.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_tworead",
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
}


# --- forward ---
@triton.jit
def _ln_long_fwd(X, W, B, Y, Mean, Rstd, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * N
    Y += row * N
    lane = tl.arange(0, BLOCK)
    # Moments about the mean of the first tile: one pass over the row, and nothing cancels when |mean| >> std.
    head = tl.load(X + lane, mask=lane < N, other=0.0).to(tl.float32)
    pivot = tl.sum(head, 0) / tl.minimum(N, BLOCK)
    first = tl.where(lane < N, head - pivot, 0.0)
    second = first * first
    for start in range(BLOCK, N, BLOCK):
        n = start + lane
        x = tl.load(X + n, mask=n < N, other=0.0).to(tl.float32)
        d = tl.where(n < N, x - pivot, 0.0)
        first += d
        second += d * d
    shift = tl.sum(first, 0) / N
    mean = pivot + shift
    rstd = tl.rsqrt(tl.maximum(tl.sum(second, 0) / N - shift * shift, 0.0) + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for start in range(0, N, BLOCK):
        n = start + lane
        x = tl.load(X + n, mask=n < N, other=0.0).to(tl.float32)
        w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
        b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(Y + n, (x - mean) * rstd * w + b, mask=n < N)


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    BLOCK = min(4096, max(64, triton.next_power_of_2(N) // 4))
    _ln_long_fwd[(M,)](x, weight, bias, y, mean, rstd, N, eps, BLOCK=BLOCK, num_warps=max(1, BLOCK // 512))
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _add_shares(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_long_bwd(
    DY, X, W, Mean, Rstd, DX, Parts, M, N, dy_m, dy_n,
    WEIGHTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0).to(tl.int64)
    m = band * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    mean = tl.load(Mean + m, mask=m < M, other=0.0)[:, None]
    rstd = tl.load(Rstd + m, mask=m < M, other=0.0)[:, None]
    x_at = X + m[:, None] * N
    dy_at = DY + m[:, None] * dy_m
    along_xhat = tl.zeros((ROWS, BLOCK), tl.float32)
    along_one = tl.zeros((ROWS, BLOCK), tl.float32)
    # Tiles of both walks are copied four ahead. They fill the shared memory of a processor: one band at a time is under
    # way on it, so that its last tiles are in L2 still when the second walk comes.
    for start in tl.range(0, N, BLOCK, num_stages=5):
        n = start + lane
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(x_at + n[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_at + n[None, :].to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        wdy = dy * tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        along_xhat += wdy * (x - mean)
        along_one += wdy
    # The sums are kept lane by lane; rows are reduced once, after the loop.
    c1 = (tl.sum(along_xhat, 1) / N)[:, None] * rstd
    c2 = (tl.sum(along_one, 1) / N)[:, None]
    tiles = tl.cdiv(N, BLOCK)
    for tile in tl.range(tiles, num_stages=5):
        n = (tiles - 1 - tile) * BLOCK + lane
        ok = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(x_at + n[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_at + n[None, :].to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        xhat = (x - mean) * rstd
        wdy = dy * tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(DX + m[:, None] * N + n[None, :], rstd * (wdy - c2 - xhat * c1), mask=ok)
        if WEIGHTS:
            out = Parts + band * 2 * N + n
            dw, db = tl.reduce((dy * xhat, dy), 0, _add_shares)
            tl.store(out, dw, mask=n < N)
            tl.store(out + N, db, mask=n < N)


@triton.jit
def _add_bands(Parts, DW, DB, bands, N, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in tl.range(0, bands, BLOCK_B, num_stages=4):
        band = start + tl.arange(0, BLOCK_B)
        at = Parts + band[:, None].to(tl.int64) * 2 * N + n[None, :]
        ok = (band[:, None] < bands) & (n[None, :] < N)
        dw += tl.load(at, mask=ok, other=0.0)
        db += tl.load(at + N, mask=ok, other=0.0)
    tl.store(DW + n, tl.sum(dw, 0), mask=n < N)
    tl.store(DB + n, tl.sum(db, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    M, N = x.shape
    weights = needs is None or needs[1] or needs[2]
    # A band of eight rows writes two rows of fp32 partials, half the bytes of its bf16 dx; fewer rows where there are
    # few bands.
    ROWS = max(1, min(4, triton.next_power_of_2(triton.cdiv(M, 264))))
    BLOCK = max(64, min(16384 // x.element_size() // ROWS, triton.next_power_of_2(N) // 4))
    bands = triton.cdiv(M, ROWS)
    dx = torch.empty_like(x)
    parts = torch.empty(bands if weights else 0, 2, N, device=x.device, dtype=torch.float32)
    _ln_long_bwd[(bands,)](
        grad_y, x, weight, mean, rstd, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1),
        WEIGHTS=weights, ROWS=ROWS, BLOCK=BLOCK, num_warps=8 if ROWS * BLOCK >= 4096 else 4,
    )  # fmt: skip
    if not weights:
        return dx, None, None
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    _add_bands[(triton.cdiv(N, 128),)](parts, dweight, dbias, bands, N, BLOCK_B=16, BLOCK_N=128, num_warps=4)
    return dx, dweight, dbias


# --- check ---
SWEEP = ({"M": 6, "N": 512}, {"M": 5, "N": 779, "dtype": "float16"}, {"M": 4, "N": 640, "dtype": "bfloat16"})
BENCH = ({"M": 4096, "N": 32768, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) + 2.0
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
