"""PolyNorm, y = w0 N(x^3) + w1 N(x^2) + w2 N(x) + b with N(z) = z / rms(z): three coupled norms in one row pass.

Each power has its own statistic and its own projection term; chained through 3 x^2, 2 x and 1 they add up to dx. The
row sums of dy * N(x^k) are needed for the projections and are at once the row's shares of the three weights' gradients,
so a program ends with four scalars.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "polynorm3",
    "family": "norm_row",
    "op": "poly_norm",
    "schema": 1,
    "techniques": ("row-local", "recompute", "scalar-gradient", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _inverse_rms(x, N, eps):
    """1/rms of x^3, x^2 and x, from one tile that is zero past the row."""
    x2 = x * x
    x4 = x2 * x2
    inv3 = tl.rsqrt(tl.sum(x4 * x2, 0) / N + eps)
    inv2 = tl.rsqrt(tl.sum(x4, 0) / N + eps)
    inv1 = tl.rsqrt(tl.sum(x2, 0) / N + eps)
    return inv3, inv2, inv1


@triton.jit
def _poly_norm_fwd(X, W, B, Y, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    inv3, inv2, inv1 = _inverse_rms(x, N, eps)
    c3 = tl.load(W).to(tl.float32) * inv3
    c2 = tl.load(W + 1).to(tl.float32) * inv2
    c1 = tl.load(W + 2).to(tl.float32) * inv1
    tl.store(Y + row * N + n, x * (c1 + x * (c2 + x * c3)) + tl.load(B).to(tl.float32), mask=n < N)


def _launch(N):
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def forward(x, weight, bias, eps=1e-6):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    _poly_norm_fwd[(M,)](x, weight, bias, y, N, eps, **_launch(N))
    return y, (x, weight, bias, eps)


# --- backward ---
@triton.jit
def _add_seven(a0, b0, c0, d0, e0, f0, g0, a1, b1, c1, d1, e1, f1, g1):
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1, e0 + e1, f0 + f1, g0 + g1


@triton.jit
def _poly_norm_bwd(DY, X, W, DX, Parts, M, N, dy_m, dy_n, eps, rows_each, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    band = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    w3 = tl.load(W).to(tl.float32)
    w2 = tl.load(W + 1).to(tl.float32)
    w1 = tl.load(W + 2).to(tl.float32)
    dw3 = 0.0
    dw2 = 0.0
    dw1 = 0.0
    db = 0.0
    # Two rows ahead are copied while the warps wait for one another.
    for row in tl.range(band * rows_each, tl.minimum((band + 1) * rows_each, M), num_stages=STAGES):
        x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_m + n * dy_n, mask=n < N, other=0.0).to(tl.float32)
        # 1/rms leaves the sums of dy * N(x^k) as a factor: all seven sums of the row are one reduction.
        x2 = x * x
        x4 = x2 * x2
        t1 = dy * x
        t2 = dy * x2
        q6, q4, q2, s3, s2, s1, s0 = tl.reduce((x4 * x2, x4, x2, t1 * x2, t2, t1, dy), 0, _add_seven)
        inv3 = tl.rsqrt(q6 / N + eps)
        inv2 = tl.rsqrt(q4 / N + eps)
        inv1 = tl.rsqrt(q2 / N + eps)
        dw3 += s3 * inv3
        dw2 += s2 * inv2
        dw1 += s1 * inv1
        db += s0
        # d/dx of every power, c_k x^(k-1) times (dy - x^k * projection), as polynomials in x.
        c3 = 3.0 * w3 * inv3
        c2 = 2.0 * w2 * inv2
        c1 = w1 * inv1
        p3 = c3 * inv3 * inv3 * s3 / N
        p2 = c2 * inv2 * inv2 * s2 / N
        p1 = c1 * inv1 * inv1 * s1 / N
        dx = dy * (c1 + x * (c2 + x * c3)) - x * (p1 + x2 * (p2 + x2 * p3))
        tl.store(DX + row * N + n, dx, mask=n < N)
    tl.store(Parts + band * 4, dw3)
    tl.store(Parts + band * 4 + 1, dw2)
    tl.store(Parts + band * 4 + 2, dw1)
    tl.store(Parts + band * 4 + 3, db)


def backward(saved, grad_y, needs=None):
    x, weight, bias, eps = saved
    M, N = x.shape
    launch = _launch(N)
    # One wave: 512 threads for each of 132 processors.
    rows_each = max(2, triton.cdiv(M, 132 * max(1, 16 // launch["num_warps"])))
    bands = triton.cdiv(M, rows_each)
    dx = torch.empty_like(x)
    parts = torch.empty(bands, 4, device=x.device, dtype=torch.float32)
    _poly_norm_bwd[(bands,)](
        grad_y, x, weight, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), eps, rows_each,
        STAGES=3 if launch["BLOCK"] * x.element_size() <= 32768 else 1, **launch,
    )  # fmt: skip
    sums = parts.sum(0)
    return dx, sums[:3].to(weight.dtype), sums[3:].to(bias.dtype)


# --- check ---
SWEEP = (
    {"M": 6, "N": 64},
    {"M": 11, "N": 93, "dtype": "float16"},
    {"M": 7, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.rand(3, generator=g) + 0.2, torch.randn(1, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias, eps=1e-6):
    xf, w = x.float(), weight.float()

    def norm(z):
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)

    return (w[0] * norm(xf**3) + w[1] * norm(xf**2) + w[2] * norm(xf) + bias.float()).to(x.dtype)
