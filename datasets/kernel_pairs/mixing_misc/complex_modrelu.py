"""modReLU on complex numbers in interleaved pairs: relu(|z| + b) z / |z|, with the gradient of a non-holomorphic map.

Where |z| + b > 0 the output is z + b z / |z|. Seen as two real numbers, its Jacobian keeps the cotangent's part along z
and scales the part across by 1 + b / |z|; along z the bias collects. At z = 0 output and gradient are zero.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "complex_modrelu",
    "family": "mixing_misc",
    "op": "modrelu",
    "schema": 1,
    "techniques": ("elementwise", "two-stage-partials", "column-owner", "strided-cotangent"),
    "saves": (),
    "grads": ("z", "bias"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _modrelu_fwd(Z, B, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    part = tl.arange(0, 2)[None, None, :]
    # Pairs are loaded as they lie, then parted: no strided access.
    at = 2 * (m * N + n)[:, :, None] + part
    ok = (m < M) & (n < N)
    re, im = tl.split(tl.load(Z + at, mask=ok[:, :, None], other=0.0).to(tl.float32))
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    square = re * re + im * im
    radius = tl.sqrt(tl.where(square > 0.0, square, 1.0))
    scale = tl.where((square > 0.0) & (radius + b > 0.0), 1.0 + b / radius, 0.0)
    tl.store(Y + at, tl.join(scale * re, scale * im), mask=ok[:, :, None])


def forward(z, bias):
    """z (M, N, 2) real and imaginary parts, bias (N)."""
    z, bias = z.contiguous(), bias.contiguous()
    M, N, _ = z.shape
    y = torch.empty_like(z)
    BLOCK_N = min(128, triton.next_power_of_2(N))
    BLOCK_M = 1024 // BLOCK_N
    _modrelu_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        z, bias, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return y, (z, bias)


# --- backward ---
@triton.jit
def _modrelu_bwd(
    DY, Z, B, DZ, Parts, M, N, rows_each, dy_m, dy_n, dy_c,
    DENSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    # Both parts of the numbers in the order of memory: a lane loads four of them at once and parts its own.
    number = tl.program_id(0) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)[None, :]
    share = tl.program_id(1).to(tl.int64)
    last = tl.minimum((share + 1) * rows_each, M)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(share * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)[:, None]
        ok = (m < last) & (number < 2 * N)
        at = m * (2 * N) + number
        dy_at = m * dy_m + number
        if not DENSE:
            dy_at = m * dy_m + (number // 2).to(tl.int64) * dy_n + number % 2 * dy_c
        z = tl.load(Z + at, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        re, im = tl.split(tl.reshape(z, (BLOCK_M, BLOCK_N, 2)))
        d_re, d_im = tl.split(tl.reshape(dy, (BLOCK_M, BLOCK_N, 2)))
        square = re * re + im * im
        inverse = tl.rsqrt(tl.where(square > 0.0, square, 1.0))
        on = (square > 0.0) & (square * inverse + b > 0.0)
        # The direction of z, and the cotangent's component along it.
        cos = re * inverse
        sin = im * inverse
        along = d_re * cos + d_im * sin
        across = 1.0 + b * inverse
        dz_re = tl.where(on, across * (d_re - along * cos) + along * cos, 0.0)
        dz_im = tl.where(on, across * (d_im - along * sin) + along * sin, 0.0)
        tl.store(DZ + at, tl.reshape(tl.join(dz_re, dz_im), (BLOCK_M, 2 * BLOCK_N)), mask=ok)
        dbias += tl.where(on, along, 0.0)
    tl.store(Parts + share * N + n, tl.sum(dbias, 0)[None, :], mask=n < N)


def backward(saved, grad_y, needs=None):
    z, bias = saved
    M, N, _ = z.shape
    dz = torch.empty_like(z)
    BLOCK_N = min(64, triton.next_power_of_2(N))
    BLOCK_M = 1024 // BLOCK_N
    tiles = triton.cdiv(N, BLOCK_N)
    # About eight programs for each of 132 processors, but at least four tiles of rows for every partial sum.
    rows_each = max(4 * BLOCK_M, triton.cdiv(M * tiles, 1056))
    shares = triton.cdiv(M, rows_each)
    parts = torch.empty(shares, N, device=z.device, dtype=torch.float32)
    _modrelu_bwd[(tiles, shares)](
        grad_y, z, bias, dz, parts, M, N, rows_each, *grad_y.stride(),
        DENSE=grad_y.stride()[1:] == (2, 1), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    return dz, parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = ({"M": 16, "N": 64}, {"M": 203, "N": 37}, {"M": 9, "N": 140, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 1024, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    z, bias = torch.randn(M, N, 2, generator=g), 0.5 * torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (z, bias))


def reference(z, bias):
    z32 = z.float()
    square = z32.square().sum(-1)
    radius = torch.where(square > 0.0, square, 1.0).sqrt()
    scale = torch.relu(radius + bias.float()) / radius
    return (torch.where(square > 0.0, scale, 0.0)[..., None] * z32).to(z.dtype)
