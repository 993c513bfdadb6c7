import torch
import triton
import triton.language as tl


class ReluKernels:
    @staticmethod
    @triton.jit
    def run(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.maximum(tl.load(x + at, mask=at < n), 0.0), mask=at < n)

    @staticmethod
    @triton.jit
    def adjoint(y, dy, dx, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        kept = tl.load(y + at, mask=at < n) > 0
        tl.store(dx + at, tl.where(kept, tl.load(dy + at, mask=at < n), 0.0), mask=at < n)


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        ReluKernels.run[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        ReluKernels.adjoint[(triton.cdiv(y.numel(), 256),)](y, dy, dx, y.numel(), BLOCK=256)
        return dx


class Clip(torch.autograd.Function):
    """Kernels are members of the Function itself."""

    BLOCK = 256

    @staticmethod
    @triton.jit
    def _clip(x, y, low, high, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n)
        tl.store(y + at, tl.minimum(tl.maximum(v, low), high), mask=at < n)

    @staticmethod
    @triton.jit
    def _clip_adjoint(x, dy, dx, low, high, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n)
        inside = (v >= low) & (v <= high)
        tl.store(dx + at, tl.where(inside, tl.load(dy + at, mask=at < n), 0.0), mask=at < n)

    @staticmethod
    def forward(ctx, x, low=-1.0, high=1.0):
        y = torch.empty_like(x)
        Clip._clip[(triton.cdiv(x.numel(), Clip.BLOCK),)](x, y, low, high, x.numel(), BLOCK=Clip.BLOCK)
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), Clip.BLOCK),)
        Clip._clip_adjoint[grid](x, dy, dx, ctx.low, ctx.high, x.numel(), BLOCK=Clip.BLOCK)
        return dx, None, None
