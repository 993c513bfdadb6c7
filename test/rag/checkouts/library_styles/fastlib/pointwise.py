import torch
import triton
import triton.language as tl

from fastlib.utils import compat


@compat.pointwise(rank=1)
@triton.jit
def softsign_forward_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    tl.store(out + at, v / (1 + tl.abs(v)), mask=at < n)


@compat.pointwise(rank=1)
@triton.jit
def softsign_backward_kernel(x, dy, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = 1 + tl.abs(tl.load(x + at, mask=at < n))
    tl.store(out + at, tl.load(dy + at, mask=at < n) / (d * d), mask=at < n)


class Softsign(torch.autograd.Function):
    """Kernels are called as functions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return softsign_forward_kernel(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return softsign_backward_kernel(x, dy)
