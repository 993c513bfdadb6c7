"""Dropout that stores its mask as one bit per element: the backward reads 32 decisions in one word and draws nothing.

Philox gives four numbers per call, so four neighbours share a counter. Against replaying the generator, the mask costs
1/16 of the traffic of a bf16 tensor and saves ten rounds of integer products for every four elements.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dropout_bitmask",
    "family": "dropout_rng",
    "op": "dropout",
    "schema": 1,
    "techniques": ("packed-bits", "elementwise", "strided-cotangent"),
    "saves": ("bits: int32 (M, words)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pack_dropout_fwd(X, Y, Bits, words, words_each, N, p, scale, seed, BLOCK_W: tl.constexpr):
    # Every row starts a new word: word number w covers 32 columns of row w // words_each.
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, 32)
    row = (w // words_each).to(tl.int64)
    col = (w % words_each * 32)[:, None] + bit[None, :]
    live = (w[:, None] < words) & (col < N)
    # Element e of the padded rows takes number e % 4 of counter e // 4.
    counter = w[:, None] * 8 + tl.arange(0, 8)[None, :]
    u0, u1, u2, u3 = tl.rand4x(seed, counter)
    u = tl.reshape(tl.join(tl.join(u0, u2), tl.join(u1, u3)), (BLOCK_W, 32))
    keep = live & (u >= p)
    x = tl.load(X + row[:, None] * N + col, mask=live, other=0.0).to(tl.float32)
    tl.store(Y + row[:, None] * N + col, tl.where(keep, x * scale, 0.0), mask=live)
    tl.store(Bits + w, tl.sum(keep.to(tl.int32) << bit[None, :], 1), mask=w < words)


def forward(x, p, seed):
    x = x.contiguous()
    M, N = x.shape
    words_each = triton.cdiv(N, 32)
    words = M * words_each
    scale = 1.0 / (1.0 - p)
    y = torch.empty_like(x)
    bits = torch.empty(M, words_each, device=x.device, dtype=torch.int32)
    _pack_dropout_fwd[(triton.cdiv(words, 64),)](x, y, bits, words, words_each, N, p, scale, seed, BLOCK_W=64)
    return y, (bits, scale)


# --- backward ---
@triton.jit
def _pack_dropout_bwd(DY, DX, Bits, words, words_each, N, dy_row, dy_col, scale, BLOCK_W: tl.constexpr):
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, 32)
    row = (w // words_each).to(tl.int64)
    col = (w % words_each * 32)[:, None] + bit[None, :]
    live = (w[:, None] < words) & (col < N)
    packed = tl.load(Bits + w, mask=w < words, other=0)
    keep = ((packed[:, None] >> bit[None, :]) & 1) != 0
    # Dropped elements are read all the same: a mask that differs between neighbours would forbid wide loads.
    dy = tl.load(DY + row[:, None] * dy_row + col.to(tl.int64) * dy_col, mask=live, other=0.0).to(tl.float32)
    tl.store(DX + row[:, None] * N + col, tl.where(keep, dy * scale, 0.0), mask=live)


def backward(saved, grad_y, needs=None):
    bits, scale = saved
    M, N = grad_y.shape
    dx = torch.empty(M, N, device=grad_y.device, dtype=grad_y.dtype)
    _pack_dropout_bwd[(triton.cdiv(bits.numel(), 64),)](
        grad_y, dx, bits, bits.numel(), bits.shape[1], N, grad_y.stride(0), grad_y.stride(1), scale,
        BLOCK_W=64,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 12, "N": 128}, {"M": 21, "N": 77, "dtype": "float16"}, {"M": 9, "N": 160, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), 0.2, 77 + seed


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
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


def reference(x, p, seed):
    M, N = x.shape
    padded = (N + 31) // 32 * 32
    counters = torch.arange(M * padded // 4, device=x.device)
    keep = (_philox_uniforms(seed, counters).view(M, padded) >= p)[:, :N]
    return (x.float() * keep / (1.0 - p)).to(x.dtype)
