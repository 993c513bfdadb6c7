"""LayerNorm and exact GELU: gelu' is evaluated at the normalised, affine value, which is rebuilt in the row pass.

With a = w * xhat + b, the gradient of a is g = dy * (Phi(a) + a phi(a)); from there on it is a LayerNorm's backward
with g for dy. Rows are dealt out in turn; the shares of dw and db lie interleaved so that one sum adds both.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_gelu",
    "family": "norm_fused",
    "op": "layer_norm_gelu",
    "schema": 1,
    "techniques": ("row-local", "recompute", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("mean: fp32 (M,)", "rstd: fp32 (M,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _normal_cdf(a):
    return 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))


@triton.jit
def _ln_gelu_fwd(X, W, B, Y, Mean, Rstd, N, x_row, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    x = tl.load(X + row * x_row + n, mask=n < N, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    d = tl.where(n < N, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(d * d, 0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    a = d * rstd * w + b
    tl.store(Y + row * N + n, a * _normal_cdf(a), mask=n < N)


def forward(x, weight, bias, eps=1e-5):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    BLOCK = triton.next_power_of_2(N)
    _ln_gelu_fwd[(M,)](
        x, weight, bias, y, mean, rstd, N, x.stride(0), eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512))
    )
    return y, (x, weight, bias, mean, rstd)


# --- backward ---
@triton.jit
def _gelu_slope(a):
    """Phi(a) + a phi(a). erf is Abramowitz and Stegun's 7.1.26, good to 1.5e-7: it is made of phi, which is here."""
    density = tl.exp2(-0.7213475204444817 * a * a)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(a))
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * poly * density
    return tl.where(a < 0.0, tail, 1.0 - tail) + a * density * 0.3989422804014327


@triton.jit
def _add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_gelu_bwd(DY, X, W, B, Mean, Rstd, DX, Parts, M, N, x_row, dy_row, dy_col, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    # Few programs to a processor: the next rows are copied while this one is reduced.
    for row in tl.range(pid, M, tl.num_programs(0), num_stages=4):
        rstd = tl.load(Rstd + row)
        centre = tl.load(Mean + row) * rstd
        xhat = tl.load(X + row * x_row + n, mask=n < N, other=0.0).to(tl.float32) * rstd - centre
        a = xhat * w + b
        g = tl.load(DY + row * dy_row + n * dy_col, mask=n < N, other=0.0).to(tl.float32) * _gelu_slope(a)
        dw += g * xhat
        db += g
        g *= w
        # Both sums in one reduction: one wait for the slowest warp instead of two.
        along_xhat, along_one = tl.reduce((g * xhat, g), 0, _add_pairs)
        tl.store(DX + row * N + n, rstd * (g - along_one / N - xhat * (along_xhat / N)), mask=n < N)
    tl.store(Parts + (2 * pid) * N + n, dw, mask=n < N)
    tl.store(Parts + (2 * pid + 1) * N + n, db, mask=n < N)


def backward(saved, grad_y, needs=None):
    x, weight, bias, mean, rstd = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(1, min(4, BLOCK // 256))
    # One wave: 768 threads for each of 132 processors, as the registers allow.
    programs = min(132 * 24 // warps, triton.cdiv(M, 2))
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    parts = torch.empty(programs, 2, N, device=x.device, dtype=torch.float32)
    _ln_gelu_bwd[(programs,)](
        grad_y, x, weight, bias, mean, rstd, dx, parts, M, N, x.stride(0), grad_y.stride(0), grad_y.stride(1),
        BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"M": 6, "N": 64},
    {"M": 11, "N": 93, "dtype": "float16"},
    {"M": 7, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 65536, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) * 0.8 + 0.1
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g) * 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    a = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return torch.nn.functional.gelu(a).to(x.dtype)
