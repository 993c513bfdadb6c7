"""Bessel radial basis with learned frequencies and a polynomial cutoff: a row sum for r, a column sum for freq.

With u = r / cutoff, feature k is sqrt(2 / cutoff) sin(f_k u) / r * env(u), where env(u) = 1 - (p + 1)(p + 2) / 2 u^p
+ p (p + 2) u^(p + 1) - p (p + 1) / 2 u^(p + 2) vanishes with two derivatives at u = 1. A fixed grid walks tiles
(distance, frequency): dr sums along a row of the tile, dfreq collects down the columns in registers until the walk
ends, and leaves one row of partial sums per program. Distances beyond the cutoff give and get nothing.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bessel_radial_envelope",
    "family": "geometry",
    "op": "radial_basis",
    "schema": 1,
    "techniques": ("persistent-grid", "two-stage-partials", "multi-row-tile", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("r", "freq"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _envelope(u, P: tl.constexpr):
    """env(u) and its derivative; zeros from the cutoff on."""
    low = 1.0
    for _ in tl.static_range(P - 1):
        low *= u
    inside = u < 1.0
    # Powers p - 1 and p of u serve value and slope; (1 - u)^2 divides the slope exactly.
    value = 1.0 + low * u * (-0.5 * (P + 1) * (P + 2) + u * (P * (P + 2) - u * (0.5 * P * (P + 1))))
    slope = -0.5 * P * (P + 1) * (P + 2) * low * (1.0 - u) * (1.0 - u)
    return tl.where(inside, value, 0.0), tl.where(inside, slope, 0.0)


@triton.jit
def _bessel_fwd(R, Freq, Y, E, K, inv_cutoff, norm, P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    freq = tl.load(Freq + k, mask=k < K, other=0.0)
    u = tl.load(R + e, mask=e < E, other=1.0) * inv_cutoff
    value, _ = _envelope(u, P)
    y = tl.sin(freq[None, :] * u[:, None]) * (norm * value / u)[:, None]
    tl.store(Y + e[:, None] * K + k[None, :], y, mask=(e[:, None] < E) & (k[None, :] < K))


def _blocks(K):
    BLOCK_K = triton.next_power_of_2(K)
    return max(16, 1024 // BLOCK_K), BLOCK_K


def forward(r, freq, cutoff=5.0, p=6):
    r, freq = r.contiguous(), freq.contiguous()
    E, K = r.numel(), freq.numel()
    y = torch.empty(E, K, device=r.device, dtype=r.dtype)
    BLOCK_E, BLOCK_K = _blocks(K)
    # sqrt(2 / cutoff) / r is this constant over u.
    norm = (2.0 / cutoff) ** 0.5 / cutoff
    _bessel_fwd[(triton.cdiv(E, BLOCK_E),)](
        r, freq, y, E, K, 1.0 / cutoff, norm, P=p, BLOCK_E=BLOCK_E, BLOCK_K=BLOCK_K, num_warps=4
    )
    return y, (r, freq, cutoff, norm, p)


# --- backward ---
@triton.jit
def _sine_and_cosine(p):
    """Both up to a sign that they share, and whether it is minus.

    One reduction by half turns to |r| <= pi/2, in three exact steps, then polynomials of least largest error (6e-9 and
    2e-10 over the interval): no lane has to choose between sine and cosine.
    """
    turns = tl.floor(p * 0.3183098861837907 + 0.5)
    r = p - turns * 3.140625
    r = r - turns * 0.0009675025939941406
    r = r - turns * 1.5099579897537296e-07
    z = r * r
    odd = -0.1666665952115707 + z * (0.00833306542954438 + z * (-0.00019809538944091535 + z * 2.6056310777281075e-06))
    even = 0.04166664062519059 + z * (-0.0013888402068933893 + z * (2.4761808138952512e-05 - z * 2.607566230006728e-07))
    return r + r * z * odd, 1.0 + z * (-0.4999999954731931 + z * even), (turns.to(tl.int32) & 1) != 0


@triton.jit
def _add_row_sums(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _bessel_bwd(
    DY, R, Freq, DR, Parts, E, K, dy_e, dy_k, inv_cutoff, norm,
    P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    freq = tl.load(Freq + k, mask=k < K, other=0.0)
    dfreq = tl.zeros((BLOCK_E, BLOCK_K), tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK_E, E, tl.num_programs(0) * BLOCK_E, num_stages=3):
        e = start + tl.arange(0, BLOCK_E)
        u = tl.load(R + e, mask=e < E, other=1.0) * inv_cutoff
        value, slope = _envelope(u, P)
        over_u = norm / u
        mask = (e[:, None] < E) & (k[None, :] < K)
        dy = tl.load(DY + e[:, None] * dy_e + k[None, :] * dy_k, mask=mask, other=0.0)
        phase = freq[None, :] * u[:, None]
        sine, cosine, minus = _sine_and_cosine(phase)
        # All that follows is linear in dy, which takes the sign.
        dy = tl.where(minus, -dy, dy)
        along_cos = dy * cosine
        # d(f u)/df = u takes the 1 / u of the basis away. Columns are folded once, behind the walk.
        dfreq += along_cos * (norm * value)[:, None]
        along_freq, along_sin = tl.reduce((along_cos * freq[None, :], dy * sine), 1, _add_row_sums)
        du = along_freq * over_u * value + along_sin * over_u * (slope - value / u)
        tl.store(DR + e, du * inv_cutoff, mask=e < E)
    tl.store(Parts + tl.program_id(0) * K + k, tl.sum(dfreq, 0), mask=k < K)


def backward(saved, grad_y, needs=None):
    r, freq, cutoff, norm, p = saved
    E, K = r.numel(), freq.numel()
    processors = 2 * torch.cuda.get_device_properties(r.device).multi_processor_count if r.is_cuda else 1
    BLOCK_E, BLOCK_K = _blocks(K)
    programs = min(triton.cdiv(E, BLOCK_E), 4 * processors)
    dr = torch.empty_like(r)
    parts = torch.empty(programs, K, device=r.device, dtype=torch.float32)
    _bessel_bwd[(programs,)](
        grad_y, r, freq, dr, parts, E, K, *grad_y.stride(), 1.0 / cutoff, norm,
        P=p, BLOCK_E=BLOCK_E, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return dr, parts.sum(0)


# --- check ---
SWEEP = ({"E": 256, "K": 16}, {"E": 203, "K": 7}, {"E": 90, "K": 8, "P": 5})
BENCH = ({"E": 4194304, "K": 16},)


def make_args(E, K, P=6, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    cutoff = 5.0
    # A tenth of the distances lies beyond the cutoff; none is zero, as between atoms.
    r = 0.5 + (1.1 * cutoff - 0.5) * torch.rand(E, generator=g)
    freq = torch.pi * torch.arange(1, K + 1) * (1.0 + 0.02 * torch.randn(K, generator=g))
    return r.to(device), freq.to(device), cutoff, P


def reference(r, freq, cutoff=5.0, p=6):
    u = r / cutoff
    a, b, c = -(p + 1) * (p + 2) / 2, p * (p + 2), -p * (p + 1) / 2
    envelope = torch.where(u < 1.0, 1.0 + a * u**p + b * u ** (p + 1) + c * u ** (p + 2), 0.0)
    return (2.0 / cutoff) ** 0.5 * torch.sin(freq * u[:, None]) * (envelope / r)[:, None]
