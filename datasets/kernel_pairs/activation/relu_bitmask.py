"""ReLU that keeps one bit per element: 32 comparisons become one int32 word, which the backward spreads out again.

Neither x nor y has to live until the backward; what does is 1/16 of a bf16 activation and 1/32 of an fp32 one.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "relu_bitmask",
    "family": "activation",
    "op": "relu",
    "schema": 1,
    "techniques": ("elementwise", "packed-bits", "strided-cotangent"),
    "saves": ("bits: int32 (M, W)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _relu_pack_fwd(X, Y, Bits, N, words, x_row, BLOCK_W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, 32)[None, :]
    c = w[:, None] * 32 + bit
    x = tl.load(X + row * x_row + c, mask=c < N, other=0.0)
    dead = x <= 0
    # NaN is not below zero: it passes and keeps its bit, as in PyTorch.
    tl.store(Y + row * N + c, tl.where(dead, 0.0, x), mask=c < N)
    # The terms of a row are distinct powers of two, so that their sum is their union; bit 31 is the sign.
    word = tl.sum(tl.where(dead, 0, 1) << bit, 1)
    tl.store(Bits + row * words + w, word, mask=w < words)


def _tile(N):
    words = triton.cdiv(N, 32)
    return words, min(64, triton.next_power_of_2(words))


def forward(x):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    words, BLOCK_W = _tile(N)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    bits = torch.empty(M, words, device=x.device, dtype=torch.int32)
    _relu_pack_fwd[(M, triton.cdiv(words, BLOCK_W))](x, y, bits, N, words, x.stride(0), BLOCK_W=BLOCK_W)
    return y, (bits,)


# --- backward ---
@triton.jit
def _relu_unpack_bwd(DY, Bits, DX, N, words, dy_row, dy_col, BLOCK_W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, 32)[None, :]
    c = w[:, None] * 32 + bit
    word = tl.load(Bits + row * words + w, mask=w < words, other=0)
    dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=c < N, other=0.0)
    # The shift is arithmetic; the 1 cuts off the copies of the sign.
    alive = ((word[:, None] >> bit) & 1) != 0
    tl.store(DX + row * N + c, tl.where(alive, dy, 0.0), mask=c < N)


def backward(saved, grad_y, needs=None):
    (bits,) = saved
    M, N = grad_y.shape
    words, BLOCK_W = _tile(N)
    dx = torch.empty(M, N, device=grad_y.device, dtype=grad_y.dtype)
    _relu_unpack_bwd[(M, triton.cdiv(words, BLOCK_W))](
        grad_y, bits, dx, N, words, grad_y.stride(0), grad_y.stride(1), BLOCK_W=BLOCK_W
    )
    return dx


# --- check ---
SWEEP = ({"M": 6, "N": 128, "dtype": "float16"}, {"M": 5, "N": 173}, {"M": 3, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 8192, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.relu(x)
