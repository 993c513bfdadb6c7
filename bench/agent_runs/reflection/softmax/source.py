"""Softmax over the last dimension with a scale, online: rows of any length are read in tiles."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def softmax_fwd_kernel(X, Y, stride_xm, stride_ym, N, scale, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_xm
    Y += row * stride_ym

    # Each lane keeps its own running maximum and sum; the lanes meet once, after the loop.
    b_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        b_x = tl.load(X + cols, mask=cols < N, other=float("-inf")).to(tl.float32) * scale
        b_new = tl.maximum(b_max, b_x)
        # A lane past the end of a short row has seen nothing: its maximum is -inf and its sum stays 0.
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.exp(b_x - b_shift)
        b_max = b_new
    row_max = tl.max(b_max, axis=0)
    row_sum = tl.sum(b_sum * tl.exp(b_max - row_max), axis=0)

    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        b_x = tl.load(X + cols, mask=cols < N, other=float("-inf")).to(tl.float32) * scale
        tl.store(Y + cols, tl.exp(b_x - row_max) / row_sum, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def softmax(x, scale=1.0):
    """`softmax(scale * x)` over the last dimension of x (M, N)."""
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    BLOCK_N = min(triton.next_power_of_2(N), 4096)
    softmax_fwd_kernel[(M,)](x, y, x.stride(0), y.stride(0), N, scale, BLOCK_N=BLOCK_N, num_warps=8)
    return y


SWEEP = [
    dict(M=4096, N=1024),
    dict(M=256, N=50257, scale=0.5),
    dict(M=4096, N=1024, dtype=torch.float16),
    dict(M=17, N=100, scale=2.0),
]


def make_args(M, N, scale=1.0, dtype=torch.float32, device="cuda"):
    return (torch.randn(M, N, device=device, dtype=dtype) * 3,), dict(scale=scale)


def reference(x, scale=1.0):
    return torch.softmax(scale * x, dim=-1)
