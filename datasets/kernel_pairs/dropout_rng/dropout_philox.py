"""Dropout whose mask is never stored: the backward draws the same Philox numbers again from the seed and the index."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dropout_philox",
    "family": "dropout_rng",
    "op": "dropout",
    "schema": 1,
    "techniques": ("elementwise", "rng-replay"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _keep_scale(seed, offsets, p):
    """1/(1-p) where the element survives, 0 where it is dropped; a pure function of seed and offset."""
    return tl.where(tl.rand(seed, offsets) >= p, 1.0 / (1.0 - p), 0.0)


@triton.jit
def _dropout_fwd(X, Y, numel, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)
    tl.store(Y + i, x * _keep_scale(seed, i, p), mask=i < numel)


def forward(x, p, seed):
    x = x.contiguous()
    y = torch.empty_like(x)
    _dropout_fwd[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), p, seed, BLOCK=1024)
    return y, (p, seed)


# --- backward ---
@triton.jit
def _dropout_bwd(DY, DX, rows, cols, stride_r, stride_c, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < rows * cols
    dy = tl.load(DY + (i // cols).to(tl.int64) * stride_r + (i % cols) * stride_c, mask=live, other=0.0).to(tl.float32)
    # The counter of the generator is the element's index in the forward's layout, whatever layout dy has.
    tl.store(DX + i, dy * _keep_scale(seed, i, p), mask=live)


def backward(saved, grad_y, needs=None):
    p, seed = saved
    rows, cols = grad_y.shape
    dx = torch.empty(rows, cols, device=grad_y.device, dtype=grad_y.dtype)
    _dropout_bwd[(triton.cdiv(rows * cols, 1024),)](
        grad_y, dx, rows, cols, grad_y.stride(0), grad_y.stride(1), p, seed, BLOCK=1024
    )
    return dx


# --- check ---
SWEEP = ({"M": 16, "N": 128}, {"M": 19, "N": 83, "dtype": "float16"}, {"M": 8, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), 0.25, 1234 + seed


def _philox_uniform(seed, counters):
    """The first word of Philox4x32-10 at counters (i, 0, 0, 0), as a float in [0, 1), in 64-bit integer arithmetic."""
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
    signed = torch.where(c[0] >= 2**31, c[0] - 2**32, c[0])
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


def reference(x, p, seed):
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    keep = _philox_uniform(seed, index) >= p
    return (x.float() * keep / (1.0 - p)).to(x.dtype)
