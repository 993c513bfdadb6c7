"""Two functions that a Function is made of are no pair of their own."""
import torch
import triton
import triton.language as tl


@triton.jit
def abs_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.abs(tl.load(x + at, mask=at < n)), mask=at < n)


@triton.jit
def sign_kernel(x, dy, dx, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    tl.store(dx + at, tl.where(v > 0, 1.0, -1.0) * tl.load(dy + at, mask=at < n), mask=at < n)


def abs_forward(x):
    y = torch.empty_like(x)
    abs_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y


def abs_backward(x, dy):
    dx = torch.empty_like(x)
    sign_kernel[(triton.cdiv(x.numel(), 256),)](x, dy, dx, x.numel(), BLOCK=256)
    return dx


class Abs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return abs_forward(x)

    @staticmethod
    def backward(ctx, dy):
        return abs_backward(*ctx.saved_tensors, dy)


def gelu(x):
    """Torch alone, whatever its partner's name says."""
    return torch.nn.functional.gelu(x)


def gelu_backward(x, dy):
    return abs_backward(x, dy)
