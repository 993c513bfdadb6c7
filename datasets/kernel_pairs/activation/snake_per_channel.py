"""Snake, x + sin(a x)^2 / a with a frequency for each channel of (B, C, T): dx beside a sum over time and batch.

dy/dx = 1 + sin(2 a x) and dy/da = (x sin(2 a x) - sin(a x)^2 / a) / a. Audio is long: a program owns a piece of one
channel of one sample, where a is one scalar, and its share of the channel's gradient is one number. Sine and cosine of
one angle share their range reduction, which two calls would do twice. Cotangents are read with their own strides: one
expanded over time costs nothing, but one that lies as (B, T, C) a sector for every element.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "snake_per_channel",
    "family": "activation",
    "op": "snake",
    "schema": 1,
    "techniques": ("elementwise", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "alpha"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _snake_fwd(X, Alpha, Y, C, T, BLOCK: tl.constexpr):
    channel = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(Alpha + channel % C).to(tl.float32)
    at = channel.to(tl.int64) * T + t
    x = tl.load(X + at, mask=t < T, other=0.0).to(tl.float32)
    wave = tl.sin(a * x)
    tl.store(Y + at, x + wave * wave / a, mask=t < T)


def _block(T):
    return max(32, min(2048, triton.next_power_of_2(T)))


def forward(x, alpha):
    x, alpha = x.contiguous(), alpha.contiguous()
    B, C, T = x.shape
    y = torch.empty_like(x)
    BLOCK = _block(T)
    _snake_fwd[(B * C, triton.cdiv(T, BLOCK))](x, alpha, y, C, T, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 256)))
    return y, (x, alpha)


# --- backward ---
@triton.jit
def _sine_and_cosine(p):
    """Both by one reduction to |r| <= pi/4, in three exact steps, and Taylor series that end below fp32's last bit."""
    turns = tl.floor(p * 0.6366197723675814 + 0.5)
    r = p - turns * 1.5703125
    r = r - turns * 0.0004837512969970703
    r = r - turns * 7.549789948768648e-08
    z = r * r
    sine = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880))))
    cosine = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320))))
    quarter = turns.to(tl.int32)
    odd = quarter % 2 != 0
    s = tl.where(odd, cosine, sine)
    c = tl.where(odd, sine, cosine)
    return tl.where(quarter & 2 != 0, -s, s), tl.where((quarter + 1) & 2 != 0, -c, c)


@triton.jit
def _snake_bwd(DY, X, Alpha, DX, Parts, C, T, dy_b, dy_c, dy_t, BLOCK: tl.constexpr):
    channel = tl.program_id(0)
    b, c = channel // C, channel % C
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(Alpha + c).to(tl.float32)
    at = channel.to(tl.int64) * T + t
    x = tl.load(X + at, mask=t < T, other=0.0).to(tl.float32)
    grad = DY + b.to(tl.int64) * dy_b + c.to(tl.int64) * dy_c + t.to(tl.int64) * dy_t
    dy = tl.load(grad, mask=t < T, other=0.0).to(tl.float32)
    sine, cosine = _sine_and_cosine(a * x)
    double = 2.0 * sine * cosine
    tl.store(DX + at, dy * (1.0 + double), mask=t < T)
    share = tl.sum(dy * (x * double - sine * sine / a), 0) / a
    tl.store(Parts + channel * tl.num_programs(1) + tl.program_id(1), share)


def backward(saved, grad_y, needs=None):
    x, alpha = saved
    B, C, T = x.shape
    BLOCK = _block(T)
    pieces = triton.cdiv(T, BLOCK)
    dx = torch.empty_like(x)
    parts = torch.empty(B, C, pieces, device=x.device, dtype=torch.float32)
    _snake_bwd[(B * C, pieces)](
        grad_y, x, alpha, dx, parts, C, T, *grad_y.stride(), BLOCK=BLOCK, num_warps=max(1, min(2, BLOCK // 256))
    )
    return dx, parts.sum((0, 2)).to(alpha.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "C": 4, "T": 128, "dtype": "float16"},
    {"B": 3, "C": 5, "T": 171},
    {"B": 1, "C": 3, "T": 96, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "C": 192, "T": 16384, "dtype": "bfloat16"},)


def make_args(B, C, T, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, alpha = torch.randn(B, C, T, generator=g), 0.5 + torch.rand(C, generator=g)
    return x.to(device=device, dtype=getattr(torch, dtype)), alpha.to(device)


def reference(x, alpha):
    a = alpha[:, None]
    return (x.float() + (a * x.float()).sin().square() / a).to(x.dtype)
