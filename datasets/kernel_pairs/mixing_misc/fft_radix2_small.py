"""Fourier transform of short complex rows, radix 2 in registers: the adjoint is the same network with angles reversed.

A program holds whole rows of n = 2^bits numbers, loaded in bit-reversed order. In each of the `bits` stages a number
meets the one whose index differs in one bit, by a lane exchange; twiddles are computed, one row of them for all rows.
For y = F x with F not normalised the gradient is the conjugate transpose of F times dy: every rotation turns back.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fft_radix2_small",
    "family": "mixing_misc",
    "op": "fft",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "row-local", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("z",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _fft_rows(
    Z, Y, M, z_m, z_n, z_c, TURN: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, N)[None, :]
    part = tl.arange(0, 2)[None, None, :]
    mirrored = n * 0
    for bit in tl.static_range(BITS):
        mirrored += ((n >> bit) & 1) << (BITS - 1 - bit)
    ok = tl.broadcast_to((m < M)[:, :, None], (BLOCK_M, N, 2))
    # Loaded in order, put in bit-reversed order by the registers: a gather from memory would waste most of each sector.
    z_at = (m * z_m + n.to(tl.int64) * z_n)[:, :, None] + part * z_c
    re, im = tl.split(tl.load(Z + z_at, mask=ok, other=0.0).to(tl.float32))
    mirrored = tl.broadcast_to(mirrored, (BLOCK_M, N))
    re = tl.gather(re, mirrored, 1)
    im = tl.gather(im, mirrored, 1)
    for stage in tl.static_range(BITS):
        half = 1 << stage
        partner = tl.broadcast_to(n ^ half, (BLOCK_M, N))
        other_re = tl.gather(re, partner, 1)
        other_im = tl.gather(im, partner, 1)
        upper = (n & half) != 0
        angle = (n & (half - 1)).to(tl.float32) * (TURN * 3.141592653589793 / half)
        cos = tl.cos(angle)
        sin = tl.sin(angle)
        # The pair is (a, b) with b from the upper half: a + t b below, a - t b above.
        b_re = tl.where(upper, re, other_re)
        b_im = tl.where(upper, im, other_im)
        turned_re = cos * b_re - sin * b_im
        turned_im = cos * b_im + sin * b_re
        re = tl.where(upper, other_re - turned_re, re + turned_re)
        im = tl.where(upper, other_im - turned_im, im + turned_im)
    tl.store(Y + 2 * (m * N + n)[:, :, None] + part, tl.join(re, im), mask=ok)


def _transform(z, turn):
    M, N, _ = z.shape
    y = torch.empty(M, N, 2, device=z.device, dtype=z.dtype)
    BLOCK_M = max(1, 1024 // N)
    _fft_rows[(triton.cdiv(M, BLOCK_M),)](
        z, y, M, *z.stride(), TURN=turn, BITS=N.bit_length() - 1, N=N, BLOCK_M=BLOCK_M, num_warps=4
    )
    return y


def forward(z):
    """z (M, n, 2): real and imaginary parts of rows whose length is a power of two, at most 1024."""
    return _transform(z, -1.0), ()


# --- backward ---
def backward(saved, grad_y, needs=None):
    return _transform(grad_y, 1.0)


# --- check ---
SWEEP = ({"M": 6, "bits": 6}, {"M": 37, "bits": 4}, {"M": 3, "bits": 5, "dtype": "bfloat16"})
BENCH = ({"M": 65536, "bits": 8, "dtype": "float32"},)


def make_args(M, bits, dtype="float32", device="cpu", seed=0):
    if not 1 <= bits <= 10:
        raise ValueError("rows of 2 to 1024 numbers")
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, 2**bits, 2, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(z):
    return torch.view_as_real(torch.fft.fft(torch.view_as_complex(z.float()))).to(z.dtype)
