import functools

import torch
import triton
import triton.language as tl


@functools.lru_cache(None)
def power_kernel(exponent):
    """One kernel per exponent."""

    @triton.jit
    def kernel(x_ptr, y_ptr, n, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        y = x
        for _ in tl.static_range(EXPONENT - 1):
            y *= x
        tl.store(y_ptr + at, y, mask=at < n)

    return kernel


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exponent):
        y = torch.empty_like(x)
        kernel = power_kernel(exponent)
        kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), EXPONENT=exponent, BLOCK=256)
        ctx.save_for_backward(x)
        ctx.exponent = exponent
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        POWER_ADJOINTS["plain"][(triton.cdiv(x.numel(), 256),)](
            x, dy, dx, x.numel(), EXPONENT=ctx.exponent, BLOCK=256
        )
        return (dx,) + (None,) * 1


@triton.jit
def _power_adjoint(x_ptr, dy_ptr, dx_ptr, n, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = x * 0 + EXPONENT
    for _ in tl.static_range(EXPONENT - 1):
        y *= x
    tl.store(dx_ptr + at, y * tl.load(dy_ptr + at, mask=at < n), mask=at < n)


POWER_ADJOINTS = {"plain": _power_adjoint}
