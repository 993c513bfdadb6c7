"""Dropout of softmax probabilities: the mask is drawn again, applied to dy, and only then the softmax rule applied.

The survivors' probabilities are not what the softmax gradient needs, and the mask is nothing that has to be stored: the
forward keeps x and one log-sum-exp per row. The backward rebuilds every probability p and every Philox draw, four
neighbours to one call, and with dp = dy * keep / (1 - rate) the gradient is p * (dp - sum(p * dp)).
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_dropout",
    "family": "softmax",
    "op": "softmax_dropout",
    "schema": 1,
    "techniques": ("rng-replay", "saved-lse", "recompute", "row-local", "strided-cotangent"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _survives(seed, row, quads, rate, BLOCK: tl.constexpr):
    """1 / (1 - rate) for survivors of a row, else 0: column c takes number c % 4 of counter row * quads + c // 4."""
    first, second, third, fourth = tl.rand4x(seed, row * quads + tl.arange(0, BLOCK // 4))
    drawn = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (BLOCK,))
    return tl.where(drawn >= rate, 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _softmax_drop_fwd(X, Y, Lse, N, quads, rate, seed, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * N + c
    x = tl.load(X + at, mask=c < N, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    lse = top + tl.log(tl.sum(tl.exp(x - top), 0))
    tl.store(Lse + row, lse)
    tl.store(Y + at, tl.exp(x - lse) * _survives(seed, row, quads, rate, BLOCK), mask=c < N)


def _launch(N):
    # Ten rounds of Philox for four elements: fewer elements per thread than a plain softmax would take.
    BLOCK = max(4, triton.next_power_of_2(N))
    return triton.cdiv(N, 4), {"BLOCK": BLOCK, "num_warps": max(1, min(16, BLOCK // 256))}


def forward(x, rate, seed):
    x = x.contiguous()
    M, N = x.shape
    if M * triton.cdiv(N, 4) >= 1 << 31:
        raise ValueError(f"{M} x {N} elements do not fit the 32-bit counter of the generator")
    y = torch.empty_like(x)
    lse = torch.empty(M, device=x.device, dtype=torch.float32)
    quads, constants = _launch(N)
    _softmax_drop_fwd[(M,)](x, y, lse, N, quads, rate, seed, **constants)
    return y, (x, lse, rate, seed)


# --- backward ---
@triton.jit
def _softmax_drop_bwd(DY, X, Lse, DX, N, quads, rate, seed, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    x = tl.load(X + wide * N + c, mask=c < N, other=-float("inf")).to(tl.float32)
    dy = tl.load(DY + wide * dy_row + c.to(tl.int64) * dy_col, mask=c < N, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(Lse + row))
    dp = dy * _survives(seed, row, quads, rate, BLOCK)
    tl.store(DX + wide * N + c, p * (dp - tl.sum(p * dp, 0)), mask=c < N)


def backward(saved, grad_y, needs=None):
    x, lse, rate, seed = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    quads, constants = _launch(N)
    _softmax_drop_bwd[(M,)](grad_y, x, lse, dx, N, quads, rate, seed, grad_y.stride(0), grad_y.stride(1), **constants)
    return dx


# --- check ---
SWEEP = ({"M": 8, "N": 64, "dtype": "float16"}, {"M": 7, "N": 101}, {"M": 5, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    return x, 0.3, 4321 + seed


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
def _uniform(seed, counters):
    """Philox4x32-10 at counters (i, 0, 0, 0), its four words side by side, as Triton maps them to [0, 1)."""
    low = 0xFFFFFFFF
    words = [counters.long(), *(torch.zeros_like(counters) for _ in range(3))]
    keys = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        halves = []
        for factor, word in ((0xD2511F53, words[0]), (0xCD9E8D57, words[2])):
            # 32 x 32 -> 64 bits in two steps, because int64 has no unsigned high part.
            upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
            total = ((upper & 0xFFFF) << 16) + lower
            halves.append(((upper >> 16) + (total >> 32), total & low))
        (hi_a, lo_a), (hi_b, lo_b) = halves
        words = [(hi_b ^ words[1] ^ keys[0]) & low, lo_b, (hi_a ^ words[3] ^ keys[1]) & low, lo_a]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    drawn = torch.stack(words, -1)
    signed = torch.where(drawn >= 2**31, drawn - 2**32, drawn)
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


def reference(x, rate, seed):
    M, N = x.shape
    quads = (N + 3) // 4
    keep = _uniform(seed, torch.arange(M * quads, device=x.device)).view(M, 4 * quads)[:, :N] >= rate
    return (torch.softmax(x.float(), -1) * keep / (1.0 - rate)).to(x.dtype)
