"""Magnitude and phase to real and imaginary part: a 2 x 2 Jacobian per element, with either cotangent absent."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "polar_to_cartesian",
    "family": "mixing_misc",
    "op": "polar",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "optional-cotangent", "strided-cotangent"),
    "saves": (),
    "grads": ("magnitude", "phase"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _polar_fwd(Magnitude, Phase, Re, Im, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(Magnitude + i, mask=i < size, other=0.0).to(tl.float32)
    phase = tl.load(Phase + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(Re + i, r * tl.cos(phase), mask=i < size)
    tl.store(Im + i, r * tl.sin(phase), mask=i < size)


def forward(magnitude, phase):
    """Two (M, N) tensors to two (M, N) tensors."""
    magnitude, phase = magnitude.contiguous(), phase.contiguous()
    re, im = torch.empty_like(magnitude), torch.empty_like(magnitude)
    size = magnitude.numel()
    _polar_fwd[(triton.cdiv(size, 1024),)](magnitude, phase, re, im, size, BLOCK=1024, num_warps=4)
    return (re, im), (magnitude, phase)


# --- backward ---
@triton.jit
def _polar_bwd(
    DRe, DIm, Magnitude, Phase, DMagnitude, DPhase, M, N, re_m, re_n, im_m, im_n,
    HAS_RE: tl.constexpr, HAS_IM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    ok = (m < M) & (n < N)
    at = m * N + n
    r = tl.load(Magnitude + at, mask=ok, other=0.0).to(tl.float32)
    phase = tl.load(Phase + at, mask=ok, other=0.0).to(tl.float32)
    cos = tl.cos(phase)
    sin = tl.sin(phase)
    # The cotangent seen from the point: outwards, and around the origin.
    outwards = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    around = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HAS_RE:
        d_re = tl.load(DRe + m * re_m + n * re_n, mask=ok, other=0.0).to(tl.float32)
        outwards += d_re * cos
        around -= d_re * sin
    if HAS_IM:
        d_im = tl.load(DIm + m * im_m + n * im_n, mask=ok, other=0.0).to(tl.float32)
        outwards += d_im * sin
        around += d_im * cos
    tl.store(DMagnitude + at, outwards, mask=ok)
    tl.store(DPhase + at, r * around, mask=ok)


def backward(saved, grad_re, grad_im, needs=None):
    magnitude, phase = saved
    M, N = magnitude.shape
    dmagnitude, dphase = torch.empty_like(magnitude), torch.empty_like(phase)
    d_re, d_im = (magnitude if grad is None else grad for grad in (grad_re, grad_im))
    # Spectra have 2^k + 1 columns: narrow tiles waste few lanes on the last one.
    BLOCK_N = min(512, triton.next_power_of_2(N))
    BLOCK_M = 512 // BLOCK_N
    _polar_bwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        d_re, d_im, magnitude, phase, dmagnitude, dphase, M, N, *d_re.stride(), *d_im.stride(),
        HAS_RE=grad_re is not None, HAS_IM=grad_im is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=2,
    )  # fmt: skip
    return dmagnitude, dphase


# --- check ---
SWEEP = ({"M": 16, "N": 64}, {"M": 23, "N": 77}, {"M": 9, "N": 600, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 1025, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.rand(M, N, generator=g) + 0.1
    phase = 6.0 * torch.rand(M, N, generator=g) - 3.0
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (magnitude, phase))


def reference(magnitude, phase):
    r, angle = magnitude.float(), phase.float()
    return (r * angle.cos()).to(magnitude.dtype), (r * angle.sin()).to(magnitude.dtype)
