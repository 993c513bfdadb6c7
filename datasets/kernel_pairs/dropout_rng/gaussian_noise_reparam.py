"""A reparameterised sample, z = mu + exp(logvar / 2) * noise: the noise is drawn again for the gradient of logvar.

dmu is the cotangent itself. dlogvar = dz * noise * exp(logvar / 2) / 2 needs the very numbers of the forward: they are
a function of seed and element index, four normals to one Philox call, so neither z nor the noise is kept.
"""

import torch
import triton
import triton.language as tl

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
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _normals(seed, first, BLOCK: tl.constexpr):
    """Normals number first .. first + BLOCK - 1; `first` is a multiple of 4, number i comes from counter i // 4."""
    a, b, c, d = tl.randn4x(seed, first // 4 + tl.arange(0, BLOCK // 4))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@triton.jit
def _sample_fwd(Mu, LogVar, Z, size, seed, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    mu = tl.load(Mu + i, mask=i < size, other=0.0).to(tl.float32)
    logvar = tl.load(LogVar + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(Z + i, mu + tl.exp(0.5 * logvar) * _normals(seed, first, BLOCK), mask=i < size)


def forward(mu, logvar, seed):
    mu, logvar = mu.contiguous(), logvar.contiguous()
    z = torch.empty_like(mu)
    _sample_fwd[(triton.cdiv(z.numel(), 1024),)](mu, logvar, z, z.numel(), seed, BLOCK=1024)
    return z, (logvar, seed)


# --- backward ---
@triton.jit
def _sample_dlogvar(DZ, LogVar, DLogVar, M, N, dz_m, dz_n, seed, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    ok = i < M * N
    # Counters follow the forward's flat index; the cotangent is found by its own strides.
    at = (i // N).to(tl.int64) * dz_m + (i % N).to(tl.int64) * dz_n
    dz = tl.load(DZ + at, mask=ok, other=0.0).to(tl.float32)
    half = 0.5 * tl.exp(0.5 * tl.load(LogVar + i, mask=ok, other=0.0).to(tl.float32))
    tl.store(DLogVar + i, dz * half * _normals(seed, first, BLOCK), mask=ok)


def backward(saved, grad_z, needs=None):
    logvar, seed = saved
    M, N = logvar.shape
    dlogvar = torch.empty_like(logvar)
    _sample_dlogvar[(triton.cdiv(M * N, 1024),)](
        grad_z, logvar, dlogvar, M, N, grad_z.stride(0), grad_z.stride(1), seed, BLOCK=1024
    )
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


def reference(mu, logvar, seed):
    M, N = mu.shape
    u = _philox_uniforms(seed, torch.arange((M * N + 3) // 4, device=mu.device)).view(-1, 2, 2)
    # Box-Muller: two uniforms make two normals.
    length = torch.sqrt(-2.0 * torch.log(u[..., 0].clamp(min=1.0e-7)))
    angle = 6.283185307179586 * u[..., 1]
    noise = torch.stack((length * angle.cos(), length * angle.sin()), -1).flatten()[: M * N].view(M, N).float()
    return (mu.float() + torch.exp(0.5 * logvar.float()) * noise).to(mu.dtype)
