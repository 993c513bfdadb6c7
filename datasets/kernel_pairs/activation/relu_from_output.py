"""ReLU through its output: y > 0 says all that the derivative needs, and the next layer keeps y alive anyway.

x is free as soon as y is written, also by writing y over it. Each program reads its tile of dy before it writes dx, so
that dx may be dy's own buffer where a caller owns that. The 2-D tile keeps a transposed cotangent in whole sectors.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "relu_from_output",
    "family": "activation",
    "op": "relu",
    "schema": 1,
    "techniques": ("elementwise", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _relu_fwd(X, Y, M, N, x_row, x_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (m < M) & (n < N)
    x = tl.load(X + m * x_row + n * x_col, mask=mask, other=0.0)
    # A comparison that NaN fails, so that NaN is passed on.
    tl.store(Y + m * N + n, tl.where(x < 0, 0.0, x), mask=mask)


def forward(x):
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 64))
    _relu_fwd[grid](x, y, M, N, x.stride(0), x.stride(1), BLOCK_M=32, BLOCK_N=64)
    return y, (y,)


# --- backward ---
@triton.jit
def _relu_sign_bwd(DY, Y, DX, M, N, dy_row, dy_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = (tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (m < M) & (n < N)
    y = tl.load(Y + m * N + n, mask=mask, other=0.0)
    dy = tl.load(DY + m * dy_row + n * dy_col, mask=mask, other=0.0)
    tl.store(DX + m * N + n, tl.where(y > 0, dy, 0.0), mask=mask)


def backward(saved, grad_y, needs=None):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 64))
    _relu_sign_bwd[grid](grad_y, y, dx, M, N, grad_y.stride(0), grad_y.stride(1), BLOCK_M=32, BLOCK_N=64)
    return dx


# --- check ---
SWEEP = ({"M": 32, "N": 128, "dtype": "float16"}, {"M": 45, "N": 83}, {"M": 16, "N": 64, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 8192, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.relu(x)
