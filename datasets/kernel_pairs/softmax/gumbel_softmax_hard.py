"""Gumbel-softmax with hard samples: the forward gives one-hot rows, the backward the gradient of the soft ones.

Noise is drawn from Philox in the kernel, and the soft sample saved: it holds all that the backward wants of noise and
logits, so that nothing is drawn again. dx is the softmax rule over tau, as if the soft row had been the output.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gumbel_softmax_hard",
    "family": "softmax",
    "op": "gumbel_softmax",
    "schema": 1,
    "techniques": ("straight-through", "saved-output", "row-local", "strided-cotangent"),
    "saves": ("soft: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gumbel_fwd(X, Soft, Hard, N, tau, seed, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * N + c
    x = tl.load(X + row.to(tl.int64) * x_row + c, mask=c < N, other=0.0).to(tl.float32)
    # The generator may give zero, whose double logarithm is infinite.
    uniform = tl.maximum(tl.rand(seed, row * N + c), 1e-10)
    z = (x - tl.log(-tl.log(uniform))) / tau
    z = tl.where(c < N, z, -float("inf"))
    e = tl.exp(z - tl.max(z, 0))
    tl.store(Soft + at, e / tl.sum(e, 0), mask=c < N)
    tl.store(Hard + at, tl.where(c == tl.argmax(z, 0), 1.0, 0.0), mask=c < N)


def _warps(BLOCK):
    return max(1, min(16, BLOCK // 512))


def forward(x, tau, seed):
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape
    if M * N >= 1 << 31:
        raise ValueError(f"{M} x {N} elements do not fit the 32-bit counter of the generator")
    soft = torch.empty(M, N, device=x.device, dtype=x.dtype)
    hard = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = triton.next_power_of_2(N)
    _gumbel_fwd[(M,)](x, soft, hard, N, tau, seed, x.stride(0), BLOCK=BLOCK, num_warps=_warps(BLOCK))
    return hard, (soft, tau)


# --- backward ---
@triton.jit
def _gumbel_bwd(DY, Soft, DX, N, tau, dy_row, dy_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < N
    soft = tl.load(Soft + row * N + c, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + row * N + c, soft * (dy - tl.sum(soft * dy, 0)) / tau, mask=inside)


def backward(saved, grad_y, needs=None):
    soft, tau = saved
    M, N = soft.shape
    dx = torch.empty_like(soft)
    BLOCK = triton.next_power_of_2(N)
    _gumbel_bwd[(M,)](
        grad_y, soft, dx, N, tau, grad_y.stride(0), grad_y.stride(1), BLOCK=BLOCK, num_warps=_warps(BLOCK)
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 8, "N": 64, "tau": 0.7, "dtype": "float16"},
    {"M": 7, "N": 101, "tau": 1.5},
    {"M": 5, "N": 32, "tau": 1.0, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "tau": 0.7, "dtype": "float32"},)


def make_args(M, N, tau, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), tau, 977 + seed


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
def _uniform(seed, counters, dtype):
    """Philox4x32-10 at counters (i, 0, 0, 0), first word, as Triton maps it to [0, 1)."""
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
    signed = torch.where(words[0] >= 2**31, words[0] - 2**32, words[0])
    # The factor in fp32, as the kernel has it: near one, the double logarithm tells the two apart.
    factor = torch.tensor(4.6566127342e-10, dtype=torch.float32).item()
    return torch.where(signed < 0, -signed - 1, signed).to(dtype) * factor


def _soft(x, tau, seed):
    wide = x if x.dtype is torch.float64 else x.float()
    uniform = _uniform(seed, torch.arange(x.numel(), device=x.device).view(x.shape), wide.dtype).clamp(min=1e-10)
    return torch.softmax((wide - (-uniform.log()).log()) / tau, -1)


def reference(x, tau, seed):
    soft = _soft(x, tau, seed)
    return torch.zeros_like(x).scatter(1, soft.argmax(1, keepdim=True), 1.0)


def surrogate(x, tau, seed):
    return _soft(x, tau, seed).to(x.dtype)
