"""A reparameterised sample, z = mu + exp(logvar / 2) * noise: the noise is drawn again for the gradient of logvar.

dmu is the cotangent itself. dlogvar = dz * noise * exp(logvar / 2) / 2 needs the very numbers of the forward: they are
a function of seed, row and column, four normals to one Philox call, so neither z nor the noise is kept. Rows and column
tiles are axes of the grid: no index has to be divided to find where a strided cotangent lies.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "gaussian_noise_reparam",
    "family": "dropout_rng",
    "op": "gaussian_sample",
    "schema": 1,
    "techniques": ("rng-replay", "elementwise", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("mu", "logvar"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _normals(seed, row, tile, quads, BLOCK: tl.constexpr):
    """Normals of one tile of a row: column c of row r gets number c % 4 of counter r * quads + c // 4."""
    a, b, c, d = tl.randn4x(seed, row * quads + tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@triton.jit
def _sample_fwd(Mu, LogVar, Z, N, quads, seed, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * N + n
    mu = tl.load(Mu + at, mask=n < N, other=0.0).to(tl.float32)
    logvar = tl.load(LogVar + at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Z + at, mu + tl.exp(0.5 * logvar) * _normals(seed, row, tile, quads, BLOCK), mask=n < N)


def _grid(M, N):
    block = max(32, min(1024, triton.next_power_of_2(N)))
    return (M, triton.cdiv(N, block)), {"BLOCK": block, "num_warps": max(1, block // 256)}


def forward(mu, logvar, seed):
    mu, logvar = mu.contiguous(), logvar.contiguous()
    M, N = mu.shape
    z = torch.empty_like(mu)
    grid, constants = _grid(M, N)
    _sample_fwd[grid](mu, logvar, z, N, triton.cdiv(N, 4), seed, **constants)
    return z, (logvar, seed)


# --- backward ---
@triton.jit
def _pair(u, v, SHORT: tl.constexpr):
    """Two normals of two uniforms, by Box and Muller, as `tl.randn4x` makes them.

    The angle is 2 pi v, so that it is reduced by subtracting halves from v, exactly; sine and cosine up to a common
    sign are polynomials of least largest error on a quarter turn to each side. Where u nears one, the hardware's
    logarithm is off by more than fp32 shows, but by less than a SHORT gradient does.
    """
    halves = tl.floor(2.0 * v + 0.5)
    r = 6.283185307179586 * (v - 0.5 * halves)
    z = r * r
    odd = -0.1666665952115707 + z * (0.00833306542954438 + z * (-0.00019809538944091535 + z * 2.6056310777281075e-06))
    even = 0.04166664062519059 + z * (-0.0013888402068933893 + z * (2.4761808138952512e-05 - z * 2.607566230006728e-07))
    u = tl.maximum(u, 1.0e-7)
    length = tl.sqrt(-1.3862943611198906 * libdevice.fast_log2f(u) if SHORT else -2.0 * tl.log(u))
    length = tl.where(halves == 1.0, -length, length)
    return length * (1.0 + z * (-0.4999999954731931 + z * even)), length * (r + r * z * odd)


@triton.jit
def _normals_again(seed, row, tile, quads, SHORT: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers of `_normals`, whose sines and cosines would be ready for angles of any size."""
    u, v, w, x = tl.rand4x(seed, row * quads + tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    a, b = _pair(u, v, SHORT)
    c, d = _pair(w, x, SHORT)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@triton.jit
def _sample_dlogvar(DZ, LogVar, DLogVar, N, quads, dz_m, dz_n, seed, SHORT: tl.constexpr, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * N + n
    dz = tl.load(DZ + row.to(tl.int64) * dz_m + n.to(tl.int64) * dz_n, mask=n < N, other=0.0).to(tl.float32)
    half = 0.5 * tl.exp2(0.7213475204444817 * tl.load(LogVar + at, mask=n < N, other=0.0).to(tl.float32))
    tl.store(DLogVar + at, dz * half * _normals_again(seed, row, tile, quads, SHORT, BLOCK), mask=n < N)


def backward(saved, grad_z, needs=None):
    logvar, seed = saved
    M, N = logvar.shape
    dlogvar = torch.empty_like(logvar)
    grid, constants = _grid(M, N)
    _sample_dlogvar[grid](
        grad_z, logvar, dlogvar, N, triton.cdiv(N, 4), grad_z.stride(0), grad_z.stride(1), seed,
        SHORT=logvar.element_size() == 2, **constants,
    )  # fmt: skip
    return grad_z, dlogvar


# --- check ---
SWEEP = (
    {"M": 16, "N": 64},
    {"M": 21, "N": 83, "dtype": "float16"},
    {"M": 12, "N": 96, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    mu, logvar = torch.randn(M, N, generator=g), torch.randn(M, N, generator=g) * 0.5 - 1.0
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (mu, logvar)), 31 + seed)


def _philox_uniforms(seed, counters):
    """Philox4x32-10 at counters (i, 0, 0, 0): its four words as floats in [0, 1), one new last dim of four."""
    low = 0xFFFFFFFF
    c = [counters.long(), *(torch.zeros_like(counters) for _ in range(3))]
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # 32 x 32 -> 64 bit products by halves, because int64 has no unsigned high part.
        products = []
        for factor, word in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2])):
            upper = factor * (word >> 16)
            lower = factor * (word & 0xFFFF)
            total = ((upper & 0xFFFF) << 16) + lower
            products.append(((upper >> 16) + (total >> 32), total & low))
        (hi_a, lo_a), (hi_b, lo_b) = products
        c = [(hi_b ^ c[1] ^ k0) & low, lo_b, (hi_a ^ c[3] ^ k1) & low, lo_a]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack(c, -1)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
def _noise(seed, M, N, device):
    quads = (N + 3) // 4
    u = _philox_uniforms(seed, torch.arange(M * quads, device=device)).view(-1, 2, 2)
    # Box-Muller: two uniforms make two normals.
    length = torch.sqrt(-2.0 * torch.log(u[..., 0].clamp(min=1.0e-7)))
    angle = 6.283185307179586 * u[..., 1]
    return torch.stack((length * angle.cos(), length * angle.sin()), -1).view(M, 4 * quads)[:, :N].float()


def reference(mu, logvar, seed):
    return (mu.float() + torch.exp(0.5 * logvar.float()) * _noise(seed, *mu.shape, mu.device)).to(mu.dtype)
