import functools

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

from library.lowlevel.rows import add_one

if triton is not None:

    @triton.jit
    def take_one(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) - 1, mask=at < n)

    class PlusOne(torch.autograd.Function):
        """Stands behind a guard, with a decorator of torch."""

        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, *tensors):
            def grid(meta):
                return (triton.cdiv(tensors[0].numel(), meta["BLOCK"]),)

            y = torch.empty_like(tensors[0])
            add_one[grid](tensors[0], y, y.numel())
            return y

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, dy):
            return _minus(dy)


def _over(kernel, x):
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y


_minus = functools.partial(_over, take_one)
