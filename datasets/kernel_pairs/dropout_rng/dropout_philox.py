"""Dropout whose mask is never stored: the backward draws the same Philox numbers again from the seed and the index.

One run of Philox gives four numbers. Ten rounds of wide integer products for every element would take longer than its
load and store, so element n of a row takes word n % 4 of counter n / 4, in the forward's layout, whatever dy's is, and
the rounds are seven, the fewest that pass the usual batteries of tests (Salmon et al., SC 2011).
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dropout_philox",
    "family": "dropout_rng",
    "op": "dropout",
    "schema": 1,
    "techniques": ("elementwise", "rng-replay", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _keep_scale(seed, counter, p, BLOCK: tl.constexpr):
    """1/(1-p) where an element survives, 0 where it is dropped, for BLOCK neighbours from BLOCK / 4 counters."""
    u0, u1, u2, u3 = tl.rand4x(seed, counter, n_rounds=7)
    # Two joins interleave: the inner one pairs words 0 with 2 and 1 with 3, the outer one those pairs.
    u = tl.reshape(tl.join(tl.join(u0, u2), tl.join(u1, u3)), (BLOCK,))
    return tl.where(u >= p, 1.0 / (1.0 - p), 0.0)


@triton.jit
def _dropout_fwd(X, Y, cols, quads, p, seed, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK + tl.arange(0, BLOCK)
    counter = row * quads + tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    at = row.to(tl.int64) * cols + n
    x = tl.load(X + at, mask=n < cols, other=0.0).to(tl.float32)
    tl.store(Y + at, x * _keep_scale(seed, counter, p, BLOCK), mask=n < cols)


def _grid(rows, cols):
    """A row on axis 0, tiles of at most 1024 elements on axis 1, and quads of a row; the launch's constants."""
    BLOCK = max(32, min(1024, triton.next_power_of_2(cols)))
    return (rows, triton.cdiv(cols, BLOCK)), {"BLOCK": BLOCK, "num_warps": max(1, BLOCK // 256)}


def forward(x, p, seed):
    x = x.contiguous()
    rows, cols = x.shape
    y = torch.empty_like(x)
    grid, constants = _grid(rows, cols)
    _dropout_fwd[grid](x, y, cols, triton.cdiv(cols, 4), p, seed, **constants)
    return y, (p, seed)


# --- backward ---
@triton.jit
def _dropout_bwd(DY, DX, cols, quads, stride_r, stride_c, p, seed, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK + tl.arange(0, BLOCK)
    counter = row * quads + tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    dy_at = DY + row.to(tl.int64) * stride_r + n.to(tl.int64) * stride_c
    dy = tl.load(dy_at, mask=n < cols, other=0.0).to(tl.float32)
    tl.store(DX + row.to(tl.int64) * cols + n, dy * _keep_scale(seed, counter, p, BLOCK), mask=n < cols)


def backward(saved, grad_y, needs=None):
    p, seed = saved
    rows, cols = grad_y.shape
    dx = torch.empty(rows, cols, device=grad_y.device, dtype=grad_y.dtype)
    grid, constants = _grid(rows, cols)
    _dropout_bwd[grid](grad_y, dx, cols, triton.cdiv(cols, 4), grad_y.stride(0), grad_y.stride(1), p, seed, **constants)
    return dx


# --- check ---
SWEEP = ({"M": 16, "N": 128}, {"M": 19, "N": 83, "dtype": "float16"}, {"M": 8, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), 0.25, 1234 + seed


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
def _philox_uniform(seed, counters):
    """The words of Philox4x32-7 at counters (i, 0, 0, 0), as floats in [0, 1), in 64-bit integer arithmetic."""
    low = 0xFFFFFFFF
    c = [counters.long(), *(torch.zeros_like(counters) for _ in range(3))]
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(7):
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


def reference(x, p, seed):
    rows, cols = x.shape
    quads = (cols + 3) // 4
    keep = _philox_uniform(seed, torch.arange(rows * quads, device=x.device)).view(rows, 4 * quads)[:, :cols] >= p
    return (x.float() * keep / (1.0 - p)).to(x.dtype)
