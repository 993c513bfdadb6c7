"""Randomised leaky ReLU: a negative input's slope is drawn between two bounds, and drawn again in the backward.

Slopes are positive, so the sign of y is the sign of x and the backward could read either; it reads x, an input that is
kept anyway. Four neighbours share one Philox call.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rrelu_random_slope",
    "family": "dropout_rng",
    "op": "rrelu",
    "schema": 1,
    "techniques": ("rng-replay", "elementwise", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _slopes(x, seed, row, column, quads, lower, upper, BLOCK: tl.constexpr):
    """Factor of every element: 1 where x >= 0, else lower + u (upper - lower).

    Column c of a row takes number c % 4 of counter row * quads + c // 4; `column` is a multiple of 4.
    """
    counter = row * quads + column // 4 + tl.arange(0, BLOCK // 4)
    u0, u1, u2, u3 = tl.rand4x(seed, counter)
    u = tl.reshape(tl.join(tl.join(u0, u2), tl.join(u1, u3)), (BLOCK,))
    return tl.where(x >= 0.0, 1.0, lower + u * (upper - lower))


@triton.jit
def _rrelu_fwd(X, Y, N, quads, seed, lower, upper, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK
    n = column + tl.arange(0, BLOCK)
    x = tl.load(X + row.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    y = x * _slopes(x, seed, row, column, quads, lower, upper, BLOCK)
    tl.store(Y + row.to(tl.int64) * N + n, y, mask=n < N)


def _launch(M, N):
    block = min(1024, max(4, triton.next_power_of_2(N)))
    return (M, triton.cdiv(N, block)), {"BLOCK": block, "num_warps": max(1, block // 256)}


def forward(x, lower, upper, seed):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    grid, launch = _launch(M, N)
    _rrelu_fwd[grid](x, y, N, triton.cdiv(N, 4), seed, lower, upper, **launch)
    return y, (x, lower, upper, seed)


# --- backward ---
@triton.jit
def _rrelu_bwd(DY, X, DX, N, quads, dy_m, dy_n, seed, lower, upper, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK
    n = column + tl.arange(0, BLOCK)
    x = tl.load(X + row.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    dy_at = row.to(tl.int64) * dy_m + n.to(tl.int64) * dy_n
    dy = tl.load(DY + dy_at, mask=n < N, other=0.0).to(tl.float32)
    # The counters are the forward's, whatever layout dy has.
    dx = dy * _slopes(x, seed, row, column, quads, lower, upper, BLOCK)
    tl.store(DX + row.to(tl.int64) * N + n, dx, mask=n < N)


def backward(saved, grad_y, needs=None):
    x, lower, upper, seed = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    grid, launch = _launch(M, N)
    _rrelu_bwd[grid](
        grad_y, x, dx, N, triton.cdiv(N, 4), grad_y.stride(0), grad_y.stride(1), seed, lower, upper, **launch
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 9, "N": 64},
    {"M": 14, "N": 83, "dtype": "float16"},
    {"M": 8, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, 0.125, 0.34, 2024 + seed


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


def reference(x, lower, upper, seed):
    M, N = x.shape
    quads = (N + 3) // 4
    u = _philox_uniforms(seed, torch.arange(M * quads, device=x.device)).view(M, 4 * quads)[:, :N].float()
    xf = x.float()
    return torch.where(xf >= 0, xf, xf * (lower + u * (upper - lower))).to(x.dtype)
