"""NeRF's encoding (x, sin 2^l x, cos 2^l x): each frequency sends 2^l (cos dsin - sin dcos) back along the chain rule.

A row holds the D coordinates, then per frequency l the D sines and the D cosines. The backward reads x alone, not the
2 L D values that were made of it: a sine is cheaper than the word that would hold it. The forward's tile is (point,
frequency and coordinate, sine or cosine), so that one store covers whole rows. In the backward a lane owns a coordinate
of a point and runs through the frequencies: the sum over them never leaves it, and sine and cosine of a phase share one
range reduction.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "positional_fourier_nerf",
    "family": "geometry",
    "op": "positional_encoding",
    "schema": 1,
    "techniques": ("row-local", "recompute", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "float16", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _phases(X, m, j, M, D: tl.constexpr, L: tl.constexpr):
    """2^l x and 2^l of column j = l D + d of every point; powers of two round nothing."""
    ok = (m[:, None] < M) & (j[None, :] < L * D)
    x = tl.load(X + m[:, None] * D + (j % D)[None, :], mask=ok, other=0.0).to(tl.float32)
    frequency = tl.exp2((j // D).to(tl.float32))[None, :]
    return x * frequency, frequency, ok


@triton.jit
def _encode_fwd(X, Y, M, D: tl.constexpr, L: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_J)
    phase, _, ok = _phases(X, m, j, M, D, L)
    WIDTH: tl.constexpr = D + 2 * L * D
    at = m[:, None, None] * WIDTH + (D + 2 * D * (j // D) + j % D)[None, :, None] + D * tl.arange(0, 2)[None, None, :]
    tl.store(Y + at, tl.join(tl.sin(phase), tl.cos(phase)), mask=ok[:, :, None])
    plain = ok & (j[None, :] < D)
    tl.store(Y + m[:, None] * WIDTH + j[None, :], phase, mask=plain)


def _blocks(D, L):
    BLOCK_J = triton.next_power_of_2(L * D)
    return max(1, 512 // BLOCK_J), BLOCK_J


def forward(x, frequencies=10):
    x = x.contiguous()
    M, D = x.shape
    y = torch.empty(M, D + 2 * frequencies * D, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_J = _blocks(D, frequencies)
    _encode_fwd[(triton.cdiv(M, BLOCK_M),)](x, y, M, D=D, L=frequencies, BLOCK_M=BLOCK_M, BLOCK_J=BLOCK_J, num_warps=4)
    return y, (x, frequencies)


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
def _encode_bwd(
    DY, X, DX, M, dy_m, dy_c, D: tl.constexpr, L: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ok = (m < M) & (d < D)
    source = DY + m * dy_m + d * dy_c
    x = tl.load(X + m * D + d, mask=ok, other=0.0).to(tl.float32)
    dx = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    for level in tl.static_range(L):
        # Unrolled, so that all loads of a row are under way at once; pieces of a sector come out of L1.
        dsin = tl.load(source + (2 * level + 1) * D * dy_c, mask=ok, other=0.0).to(tl.float32)
        dcos = tl.load(source + (2 * level + 2) * D * dy_c, mask=ok, other=0.0).to(tl.float32)
        sine, cosine = _sine_and_cosine(x * 2.0**level)
        dx += 2.0**level * (cosine * dsin - sine * dcos)
    tl.store(DX + m * D + d, dx, mask=ok)


def backward(saved, grad_y, needs=None):
    x, frequencies = saved
    M, D = x.shape
    dx = torch.empty_like(x)
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK_M = max(1, 128 // BLOCK_D)
    _encode_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_y, x, dx, M, *grad_y.stride(), D=D, L=frequencies, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 64, "D": 3, "L": 10},
    {"M": 37, "D": 2, "L": 5, "dtype": "float16"},
    {"M": 45, "D": 3, "L": 4, "dtype": "bfloat16"},
)
BENCH = ({"M": 1048576, "D": 3, "L": 10, "dtype": "float32"},)


def make_args(M, D, L, dtype="float32", device="cpu", seed=0):
    if L > 24:
        raise ValueError("float32 has no phase left of frequencies beyond 2^24")
    g = torch.Generator().manual_seed(seed)
    # Scenes are scaled to lie within [-1, 1].
    x = torch.rand(M, D, generator=g) * 2.0 - 1.0
    return x.to(device=device, dtype=getattr(torch, dtype)), L


def reference(x, frequencies=10):
    phase = x.float()[:, None, :] * 2.0 ** torch.arange(frequencies, device=x.device)[:, None]
    waves = torch.stack((phase.sin(), phase.cos()), 2).flatten(1)
    return torch.cat((x, waves.to(x.dtype)), 1)
