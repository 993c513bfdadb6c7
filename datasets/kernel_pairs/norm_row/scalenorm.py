"""ScaleNorm, y = g * x / ||x|| with one learned scalar g: its gradient is a reduction over everything, in two stages.

dg is the sum over all rows of <dy, u>, u the unit vector, and <dy, u> is also the part that dx gives up. So every
row's sum is taken once, for dx; a program adds those of its rows in a scalar, and a single program adds the programs.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scalenorm",
    "family": "norm_row",
    "op": "scale_norm",
    "schema": 1,
    "techniques": ("scalar-gradient", "two-stage-partials", "saved-statistics", "row-local", "strided-cotangent"),
    "saves": ("inv_norm: fp32 (M,)",),
    "grads": ("x", "g"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _scale_norm_fwd(X, G, Y, InvNorm, N, floor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    # The floor under the square keeps a row of zeros finite.
    inv = tl.rsqrt(tl.sum(x * x, 0) + floor)
    tl.store(InvNorm + row, inv)
    tl.store(Y + row * N + n, x * (inv * tl.load(G).to(tl.float32)), mask=n < N)


def forward(x, g, floor=1e-10):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    inv_norm = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _scale_norm_fwd[(M,)](x, g, y, inv_norm, N, floor, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)))
    return y, (x, g, inv_norm)


# --- backward ---
@triton.jit
def _scale_norm_bwd(DY, X, G, InvNorm, DX, Parts, M, N, dy_m, dy_n, rows_each, BLOCK: tl.constexpr):
    band = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    g = tl.load(G).to(tl.float32)
    dg = 0.0
    for row in range(band * rows_each, tl.minimum((band + 1) * rows_each, M)):
        inv = tl.load(InvNorm + row)
        u = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32) * inv
        dy = tl.load(DY + row * dy_m + n * dy_n, mask=n < N, other=0.0).to(tl.float32)
        along = tl.sum(dy * u, 0)
        dg += along
        tl.store(DX + row * N + n, g * inv * (dy - u * along), mask=n < N)
    tl.store(Parts + band, dg)


@triton.jit
def _add_parts(Parts, DG, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        total += tl.load(Parts + start + i, mask=start + i < count, other=0.0)
    tl.store(DG, tl.sum(total, 0))


def backward(saved, grad_y, needs=None):
    x, g, inv_norm = saved
    M, N = x.shape
    BLOCK = triton.next_power_of_2(N)
    warps = max(1, min(16, BLOCK // 512))
    # No sums live across rows but one scalar: short bands, up to 4096 of them, balance better than one wave.
    rows_each = triton.cdiv(M, 4096)
    bands = triton.cdiv(M, rows_each)
    dx = torch.empty_like(x)
    parts = torch.empty(bands, device=x.device, dtype=torch.float32)
    _scale_norm_bwd[(bands,)](
        grad_y, x, g, inv_norm, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), rows_each,
        BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    if needs is not None and not needs[1]:
        return dx, None
    dg = torch.empty_like(g)
    _add_parts[(1,)](parts, dg, bands, BLOCK=1024, num_warps=4)
    return dx, dg


# --- check ---
SWEEP = (
    {"M": 9, "N": 64},
    {"M": 14, "N": 83, "dtype": "float16"},
    {"M": 8, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    # g begins at the root of the width.
    return torch.randn(M, N, generator=gen).to(**to), torch.full((1,), float(N) ** 0.5).to(**to)


def reference(x, g, floor=1e-10):
    xf = x.float()
    return (g.float() * xf * torch.rsqrt(xf.pow(2).sum(-1, keepdim=True) + floor)).to(x.dtype)
