"""LayerNorm(x + bias): the column sum of dx is the bias's gradient and rides along with the norm's own sums.

The sum x + bias is formed again in the backward from a bias that stays in registers. A program walks its band of rows
and keeps three column sums, of dy * xhat, of dy, and of dx; they leave as three rows of one buffer and are added by one
launch whose grid covers the three rows.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "add_bias_layernorm",
    "family": "norm_fused",
    "op": "bias_layer_norm",
    "schema": 1,
    "techniques": (
        "row-local", "recompute", "saved-statistics", "broadcast-reduction", "two-stage-partials", "strided-cotangent",
    ),
    "saves": ("stats: fp32 (M, 2)",),
    "grads": ("x", "bias", "gamma", "beta"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _bias_ln_fwd(X, Bias, Gamma, Beta, Y, Stats, M, N, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # Three parameter rows are fetched once for ROWS rows of x.
    n = tl.arange(0, BLOCK)
    ok = n < N
    bias = tl.load(Bias + n, mask=ok, other=0.0).to(tl.float32)
    gamma = tl.load(Gamma + n, mask=ok, other=0.0).to(tl.float32)
    beta = tl.load(Beta + n, mask=ok, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, M)):
        h = tl.load(X + row * N + n, mask=ok, other=0.0).to(tl.float32) + bias
        mean = tl.sum(tl.where(ok, h, 0.0), 0) / N
        away = tl.where(ok, h - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(away * away, 0) / N + eps)
        tl.store(Stats + 2 * row, mean)
        tl.store(Stats + 2 * row + 1, rstd)
        tl.store(Y + row * N + n, away * rstd * gamma + beta, mask=ok)


def forward(x, bias, gamma, beta, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    stats = torch.empty(M, 2, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _bias_ln_fwd[(triton.cdiv(M, 4),)](
        x, bias, gamma, beta, y, stats, M, N, eps, ROWS=4, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512))
    )
    return y, (x, bias, gamma, stats)


# --- backward ---
@triton.jit
def _add_two(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _bias_ln_bwd(
    DY, X, Bias, Gamma, Stats, DX, Parts, M, N, dy_row, dy_col, rows_each,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0).to(tl.int64)
    bands = tl.num_programs(0)
    n = tl.arange(0, BLOCK)
    ok = n < N
    bias = tl.load(Bias + n, mask=ok, other=0.0).to(tl.float32)
    gamma = tl.load(Gamma + n, mask=ok, other=0.0).to(tl.float32)
    dgamma = tl.zeros((BLOCK,), tl.float32)
    dbeta = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    # Five rows of parameters and sums leave room for few programs: the next two rows are copied meanwhile.
    for row in tl.range(band * rows_each, tl.minimum((band + 1) * rows_each, M), num_stages=STAGES):
        h = tl.load(X + row * N + n, mask=ok, other=0.0).to(tl.float32) + bias
        rstd = tl.load(Stats + 2 * row + 1)
        xhat = tl.where(ok, (h - tl.load(Stats + 2 * row)) * rstd, 0.0)
        dy = tl.load(DY + row * dy_row + n * dy_col, mask=ok, other=0.0).to(tl.float32)
        dgamma += dy * xhat
        dbeta += dy
        dxhat = dy * gamma
        shift, slope = tl.reduce((dxhat, dxhat * xhat), 0, _add_two)
        dh = rstd * (dxhat - shift / N - xhat * (slope / N))
        tl.store(DX + row * N + n, dh, mask=ok)
        dbias += dh
    tl.store(Parts + band * N + n, dgamma, mask=ok)
    tl.store(Parts + (bands + band) * N + n, dbeta, mask=ok)
    tl.store(Parts + (2 * bands + band) * N + n, dbias, mask=ok)


@triton.jit
def _three_column_sums(Parts, Out, bands, N, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    which = tl.program_id(1)
    acc = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in range(0, bands, BLOCK_B):
        band = start + tl.arange(0, BLOCK_B)
        at = (which * bands + band)[:, None] * N + n[None, :]
        acc += tl.load(Parts + at, mask=(band[:, None] < bands) & (n[None, :] < N), other=0.0)
    tl.store(Out + which * N + n, tl.sum(acc, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, bias, gamma, stats = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(1, min(16, BLOCK // 256))
    # One wave: 768 threads for each of 132 processors, as the registers allow.
    rows_each = max(2, triton.cdiv(M, 132 * max(1, 24 // warps)))
    bands = triton.cdiv(M, rows_each)
    dx = torch.empty_like(x)
    parts = torch.empty(3, bands, N, device=x.device, dtype=torch.float32)
    sums = torch.empty(3, N, device=x.device, dtype=gamma.dtype)
    _bias_ln_bwd[(bands,)](
        grad_y, x, bias, gamma, stats, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), rows_each,
        STAGES=3 if BLOCK * x.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    _three_column_sums[(triton.cdiv(N, 16), 3)](parts, sums, bands, N, BLOCK_B=64, BLOCK_N=16)
    return dx, sums[2], sums[0], sums[1]


# --- check ---
SWEEP = (
    {"M": 6, "N": 64},
    {"M": 11, "N": 93, "dtype": "float16"},
    {"M": 7, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, N, generator=g),
        torch.randn(N, generator=g) * 0.5,
        torch.rand(N, generator=g) + 0.5,
        torch.randn(N, generator=g),
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, bias, gamma, beta, eps=1e-5):
    h = x.float() + bias.float()
    return torch.nn.functional.layer_norm(h, (x.shape[1],), gamma.float(), beta.float(), eps).to(x.dtype)
