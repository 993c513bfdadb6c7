"""Grouped rational activation P(x) / Q(x) of degrees 5 and 4: ten coefficient gradients per group beside dx.

Q = 1 + |b1 x + ... + b4 x^4| has no poles. A program owns rows of the columns of one group, so that all coefficients
are scalars, and keeps one running sum for each of them in every lane; only at the end of its rows it reduces the ten.
Partials lie as (strips, groups, 10): numerator first, so that one sum over strips ends both gradients.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "rational_grouped",
    "family": "activation",
    "op": "rational",
    "schema": 1,
    "techniques": ("elementwise", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "numerator", "denominator"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _coefficients(Numerator, Denominator, g):
    a0 = tl.load(Numerator + 6 * g).to(tl.float32)
    a1 = tl.load(Numerator + 6 * g + 1).to(tl.float32)
    a2 = tl.load(Numerator + 6 * g + 2).to(tl.float32)
    a3 = tl.load(Numerator + 6 * g + 3).to(tl.float32)
    a4 = tl.load(Numerator + 6 * g + 4).to(tl.float32)
    a5 = tl.load(Numerator + 6 * g + 5).to(tl.float32)
    b1 = tl.load(Denominator + 4 * g).to(tl.float32)
    b2 = tl.load(Denominator + 4 * g + 1).to(tl.float32)
    b3 = tl.load(Denominator + 4 * g + 2).to(tl.float32)
    b4 = tl.load(Denominator + 4 * g + 3).to(tl.float32)
    return a0, a1, a2, a3, a4, a5, b1, b2, b3, b4


@triton.jit
def _rational_fwd(X, Numerator, Denominator, Y, M, WIDTH, x_row, y_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    g = tl.program_id(1)
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = tl.arange(0, BLOCK)[None, :]
    mask = (m < M) & (n < WIDTH)
    a0, a1, a2, a3, a4, a5, b1, b2, b3, b4 = _coefficients(Numerator, Denominator, g)
    x = tl.load(X + m * x_row + g * WIDTH + n, mask=mask, other=0.0).to(tl.float32)
    p = a0 + x * (a1 + x * (a2 + x * (a3 + x * (a4 + x * a5))))
    s = x * (b1 + x * (b2 + x * (b3 + x * b4)))
    tl.store(Y + m * y_row + g * WIDTH + n, p / (1.0 + tl.abs(s)), mask=mask)


def _tile(width):
    """Rows and columns of a tile of 512 elements: ten sums of four lanes each fit a thread's registers."""
    BLOCK = triton.next_power_of_2(width)
    return max(1, 512 // BLOCK), BLOCK


def forward(x, numerator, denominator):
    x = x if x.stride(1) == 1 else x.contiguous()
    numerator, denominator = numerator.contiguous(), denominator.contiguous()
    M, N = x.shape
    G = numerator.shape[0]
    if N % G:
        raise ValueError(f"{N} channels do not divide into {G} groups")
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    ROWS, BLOCK = _tile(N // G)
    _rational_fwd[(triton.cdiv(M, ROWS), G)](
        x, numerator, denominator, y, M, N // G, x.stride(0), N, ROWS=ROWS, BLOCK=BLOCK
    )
    return y, (x, numerator, denominator)


# --- backward ---
@triton.jit
def _rational_bwd(
    DY, X, Numerator, Denominator, DX, Parts, M, WIDTH, steps, dy_row, dy_col, x_row, dx_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(1)
    n = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[None, :]
    a0, a1, a2, a3, a4, a5, b1, b2, b3, b4 = _coefficients(Numerator, Denominator, g)
    d0 = tl.zeros((ROWS, BLOCK), tl.float32)
    d1, d2, d3, d4, d5 = d0, d0, d0, d0, d0
    e1, e2, e3, e4 = d0, d0, d0, d0
    # The sums leave registers for few programs and small tiles: four tiles are read before the first is worked on.
    begin = tl.program_id(0).to(tl.int64) * steps * ROWS
    X += g * WIDTH + n
    DX += g * WIDTH + n
    DY += (g * WIDTH + n).to(tl.int64) * dy_col
    for step in range(0, steps, 4):
        xs = ()
        dys = ()
        for ahead in tl.static_range(4):
            m = (begin + (step + ahead) * ROWS + tl.arange(0, ROWS))[:, None]
            mask = (m < M) & (n < WIDTH) & (step + ahead < steps)
            xs += (tl.load(X + m * x_row, mask=mask, other=0.0),)
            dys += (tl.load(DY + m * dy_row, mask=mask, other=0.0),)
        for ahead in tl.static_range(4):
            m = (begin + (step + ahead) * ROWS + tl.arange(0, ROWS))[:, None]
            mask = (m < M) & (n < WIDTH) & (step + ahead < steps)
            x = xs[ahead].to(tl.float32)
            dy = dys[ahead].to(tl.float32)
            p = a0 + x * (a1 + x * (a2 + x * (a3 + x * (a4 + x * a5))))
            dp = a1 + x * (2.0 * a2 + x * (3.0 * a3 + x * (4.0 * a4 + x * 5.0 * a5)))
            s = x * (b1 + x * (b2 + x * (b3 + x * b4)))
            ds = b1 + x * (2.0 * b2 + x * (3.0 * b3 + x * 4.0 * b4))
            # dy/dP, and dy/ds by way of Q and the sign in its absolute value; one division serves both.
            inverse = libdevice.fast_dividef(tl.full(s.shape, 1.0, tl.float32), 1.0 + tl.abs(s))
            u = dy * inverse
            w = u * p * inverse
            w = tl.where(s > 0, -w, tl.where(s < 0, w, 0.0))
            tl.store(DX + m * dx_row, u * dp + w * ds, mask=mask)
            # Powers of x make every sum one multiply-add.
            x2 = x * x
            x3 = x2 * x
            x4 = x2 * x2
            d0 += u
            d1 += u * x
            d2 += u * x2
            d3 += u * x3
            d4 += u * x4
            d5 += u * (x4 * x)
            e1 += w * x
            e2 += w * x2
            e3 += w * x3
            e4 += w * x4
    share = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    out = Parts + (share * tl.num_programs(1) + g) * 10
    tl.store(out, tl.sum(d0))
    tl.store(out + 1, tl.sum(d1))
    tl.store(out + 2, tl.sum(d2))
    tl.store(out + 3, tl.sum(d3))
    tl.store(out + 4, tl.sum(d4))
    tl.store(out + 5, tl.sum(d5))
    tl.store(out + 6, tl.sum(e1))
    tl.store(out + 7, tl.sum(e2))
    tl.store(out + 8, tl.sum(e3))
    tl.store(out + 9, tl.sum(e4))


def backward(saved, grad_y, needs=None):
    x, numerator, denominator = saved
    (M, N), G = x.shape, numerator.shape[0]
    # Columns in tiles that 384 and the like fill: a tile as wide as the next power of two has idle lanes.
    ROWS, BLOCK = _tile(min(128, N // G))
    tiles, columns = triton.cdiv(M, ROWS), triton.cdiv(N // G, BLOCK)
    # One wave: five programs for each of 132 processors, and at least four tiles for one reduction of ten.
    steps = max(4, triton.cdiv(tiles, max(1, 5 * 132 // (G * columns))))
    strips = triton.cdiv(tiles, steps)
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    parts = torch.empty(strips * columns, G, 10, device=x.device, dtype=torch.float32)
    _rational_bwd[(strips, G, columns)](
        grad_y, x, numerator, denominator, dx, parts, M, N // G, steps, *grad_y.stride(), x.stride(0), N,
        ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    totals = parts.sum(0)
    return dx, totals[:, :6].to(numerator.dtype), totals[:, 6:].to(denominator.dtype)


# --- check ---
SWEEP = (
    {"M": 40, "G": 2, "WIDTH": 32, "dtype": "float16"},
    {"M": 53, "G": 3, "WIDTH": 21},
    {"M": 24, "G": 2, "WIDTH": 64, "dtype": "bfloat16"},
)
BENCH = ({"M": 32768, "G": 8, "WIDTH": 384, "dtype": "bfloat16"},)


def make_args(M, G, WIDTH, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, G * WIDTH, generator=g).to(device=device, dtype=getattr(torch, dtype))
    numerator, denominator = 0.5 * torch.randn(G, 6, generator=g), 0.5 * torch.randn(G, 4, generator=g)
    return x, numerator.to(device), denominator.to(device)


def reference(x, numerator, denominator):
    G = numerator.shape[0]
    z = x.float().unflatten(-1, (G, -1))
    a, b = numerator[..., None].unbind(1), denominator[..., None].unbind(1)
    p = a[0] + z * (a[1] + z * (a[2] + z * (a[3] + z * (a[4] + z * a[5]))))
    s = z * (b[0] + z * (b[1] + z * (b[2] + z * b[3])))
    return (p / (1 + s.abs())).flatten(-2).to(x.dtype)
