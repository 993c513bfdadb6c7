"""Asymmetric fake quantisation with a learned scale and zero point for each channel: two column sums beside dx.

y = s * (clamp(round(x / s + z), 0, high) - z) with z rounded. Inside the range the zero point cancels, so that only
clamped elements feed its gradient (-s each), while the scale's gets (y - x) / s inside and level - z at a clamp. A
program walks the row tiles of its strip of columns and keeps both sums in registers until the strip ends.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "fakequant_per_channel_zp",
    "family": "quant",
    "op": "fake_quantize",
    "schema": 1,
    "techniques": ("straight-through", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "scale", "zero"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _levels(x, scale, zero, high):
    """The level before the clamp, as a float. Correctly rounded division: ties must not hang on an approximation."""
    return libdevice.rint(tl.div_rn(x, tl.broadcast_to(scale, x.shape)) + zero)


@triton.jit
def _channel_quant_fwd(X, Scale, Zero, Y, M, N, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (m < M) & (n < N)
    scale = tl.load(Scale + n, mask=n < N, other=1.0)
    zero = libdevice.rint(tl.load(Zero + n, mask=n < N, other=0.0))
    x = tl.load(X + m * N + n, mask=mask, other=0.0).to(tl.float32)
    level = tl.minimum(tl.maximum(_levels(x, scale, zero, high), 0.0), high)
    tl.store(Y + m * N + n, (level - zero) * scale, mask=mask)


def forward(x, scale, zero, bits=8):
    x, scale, zero = x.contiguous(), scale.contiguous(), zero.contiguous()
    M, N = x.shape
    high = float((1 << bits) - 1)
    y = torch.empty_like(x)
    _channel_quant_fwd[(triton.cdiv(M, 16), triton.cdiv(N, 128))](
        x, scale, zero, y, M, N, high, BLOCK_M=16, BLOCK_N=128
    )
    return y, (x, scale, zero, high)


# --- backward ---
@triton.jit
def _quotient(x, scale, inverse):
    """x / scale, correctly rounded as by the forward: two corrections by exact remainders, one division per column."""
    q = x * inverse
    q = tl.fma(tl.fma(-q, scale, x), inverse, q)
    return tl.fma(tl.fma(-q, scale, x), inverse, q)


@triton.jit
def _channel_quant_bwd(
    DY, X, Scale, Zero, DX, Parts, M, N, high, steps, dy_row, dy_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    strip = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = tl.load(Scale + n, mask=n < N, other=1.0)[None, :]
    zero = libdevice.rint(tl.load(Zero + n, mask=n < N, other=0.0))[None, :]
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    d_scale = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    d_zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(steps, num_stages=4):
        m = ((strip * steps + step).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        mask = (m < M) & (n[None, :] < N)
        x = tl.load(X + m * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + m * dy_row + n[None, :].to(tl.int64) * dy_col, mask=mask, other=0.0).to(tl.float32)
        ratio = _quotient(x, scale, inverse)
        free = libdevice.rint(ratio + zero)
        level = tl.minimum(tl.maximum(free, 0.0), high)
        inside = level == free
        d_scale += dy * (level - zero - tl.where(inside, ratio, 0.0))
        d_zero += tl.where(inside, 0.0, dy)
        tl.store(DX + m * N + n[None, :], tl.where(inside, dy, 0.0), mask=mask)
    # Rows 2 * strip and 2 * strip + 1 of one buffer: one sum over strips ends both gradients.
    out = Parts + 2 * strip * N + n
    tl.store(out, tl.sum(d_scale, 0), mask=n < N)
    tl.store(out + N, -tl.sum(d_zero * scale, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, scale, zero, high = saved
    M, N = x.shape
    BLOCK_M, BLOCK_N = 16, 128
    tiles, columns = triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N)
    # About eight programs for each of 132 processors, at least two tiles for each program.
    steps = max(2, triton.cdiv(tiles * columns, 8 * 132))
    strips = triton.cdiv(tiles, steps)
    dx = torch.empty_like(x)
    parts = torch.empty(strips, 2, N, device=x.device, dtype=torch.float32)
    _channel_quant_bwd[(strips, columns)](
        grad_y, x, scale, zero, dx, parts, M, N, high, steps, grad_y.stride(0), grad_y.stride(1),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    totals = parts.sum(0)
    return dx, totals[0].to(scale.dtype), totals[1].to(zero.dtype)


# --- check ---
SWEEP = (
    {"M": 64, "N": 128, "bits": 4, "dtype": "float16"},
    {"M": 75, "N": 70},
    {"M": 24, "N": 96, "bits": 4, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, bits=8, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) + 0.5
    # The range covers about nine tenths of a channel, off its middle, so that both clamps take effect. Scales are short
    # binary fractions: no 16-bit x then lies so near a clamp that rounding decides on which side.
    scale = torch.randint(48, 65, (N,), generator=g) / (16 << bits)
    zero = (1 << bits) * (0.3 + 0.2 * torch.rand(N, generator=g))
    return x.to(device=device, dtype=getattr(torch, dtype)), scale.to(device), zero.to(device), bits


def reference(x, scale, zero, bits=8):
    z = zero.round()
    return (((x.float() / scale + z).round().clamp(0, (1 << bits) - 1) - z) * scale).to(x.dtype)


def surrogate(x, scale, zero, bits=8):
    def straight(v):
        return v + (v.round() - v).detach()

    z = straight(zero)
    level = straight(x / scale + z).clamp(0, (1 << bits) - 1)
    return ((level - z) * scale).to(x.dtype)
