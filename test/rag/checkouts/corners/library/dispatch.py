import torch
import triton
import triton.language as tl
from torch import autograd


@triton.jit
def copy_narrow(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def copy_wide(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


class Picked(autograd.Function):
    """The kernel is a local name."""

    @classmethod
    def grid(cls, n):
        return (triton.cdiv(n, 256),)

    @staticmethod
    def forward(ctx, x):
        kernel = copy_wide if x.numel() > 2**31 else copy_narrow
        y = torch.empty_like(x)
        kernel[Picked.grid(x.numel())](x, y, x.numel(), BLOCK=256)
        return y

    @staticmethod
    def backward(ctx, dy):
        kernels = {True: copy_wide, False: copy_narrow}
        dx = torch.empty_like(dy)
        kernels[dy.numel() > 2**31][Picked.grid(dy.numel())](dy, dx, dy.numel(), BLOCK=256)
        return dx


class Meta:
    """No Function, though it has both halves."""

    @staticmethod
    def forward(ctx, x):
        return Picked.apply(x)

    @staticmethod
    def backward(ctx, dy):
        return Picked.apply(dy)


class PickedAgain(Picked):
    """Another forward over its base's backward."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        copy_narrow[PickedAgain.grid(x.numel())](x, y, x.numel(), BLOCK=256)
        return y
