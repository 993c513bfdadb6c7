"""Old and new versions of what this library stands on."""
import functools
import operator

import torch

try:
    from triton import jit as kernel
except ImportError:

    def kernel(function):
        return function


def at_least(version):
    return operator.ge(tuple(map(int, torch.__version__.split(".")[:2])), version)


if at_least((2, 4)):
    custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="cuda")
    custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="cuda")
else:
    custom_fwd = torch.cuda.amp.custom_fwd
    custom_bwd = torch.cuda.amp.custom_bwd


def pointwise(rank=1):
    """A kernel over elements becomes a function of tensors."""

    def wrap(function):
        @functools.wraps(function.fn)
        def called(*tensors):
            out = torch.empty_like(tensors[0])
            function[(out.numel() // 256 + 1,)](*tensors, out, out.numel(), BLOCK=256)
            return out

        return called

    return wrap
