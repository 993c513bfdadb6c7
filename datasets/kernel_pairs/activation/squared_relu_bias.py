"""Bias and squared ReLU: dx is local to the element, dbias is its column sum, taken tile by tile as partials."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "squared_relu_bias",
    "family": "activation",
    "op": "squared_relu",
    "schema": 1,
    "techniques": ("elementwise", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _relu2_fwd(X, Bias, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(X + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.maximum(x + tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :], 0.0)
    tl.store(Y + m[:, None] * N + n[None, :], z * z, mask=mask)


def forward(x, bias):
    x, bias = x.contiguous(), bias.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 128))
    _relu2_fwd[grid](x, bias, y, M, N, BLOCK_M=32, BLOCK_N=128)
    return y, (x, bias)


# --- backward ---
@triton.jit
def _relu2_bwd(
    DY, X, Bias, DX, Parts, M, N, stride_m, stride_n, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # A program walks STEPS row tiles of one column strip: fewer partial rows, and the bias is read once.
    strip = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.load(Bias + n, mask=n < N, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(STEPS, num_stages=4):
        m = (strip.to(tl.int64) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + m[:, None] * stride_m + n[None, :] * stride_n, mask=mask, other=0.0).to(tl.float32)
        dx = 2.0 * tl.maximum(x + bias[None, :], 0.0) * dy
        tl.store(DX + m[:, None] * N + n[None, :], dx, mask=mask)
        total += dx
    tl.store(Parts + strip * N + n, tl.sum(total, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, bias = saved
    M, N = x.shape
    STEPS, BLOCK_M, BLOCK_N = 8, 16, 128
    strips = triton.cdiv(M, STEPS * BLOCK_M)
    dx = torch.empty_like(x)
    parts = torch.empty(strips, N, device=x.device, dtype=torch.float32)
    _relu2_bwd[(strips, triton.cdiv(N, BLOCK_N))](
        grad_y, x, bias, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1),
        STEPS=STEPS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    return dx, parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = ({"M": 64, "N": 128}, {"M": 75, "N": 70, "dtype": "float16"}, {"M": 20, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(M, N, generator=g), torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, bias))


def reference(x, bias):
    return torch.relu(x.float() + bias.float()).square().to(x.dtype)
