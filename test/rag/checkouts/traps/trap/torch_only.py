import torch
import numba

from .kernels import copy

HANDLERS = {"one": torch.add}


class TorchOnly(torch.autograd.Function):
    """Speaks of a triton kernel, and has none."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class Mentions(torch.autograd.Function):
    """Names a kernel, launches none: what is called after brackets is a table of torch functions."""

    @staticmethod
    def forward(ctx, x):
        if copy is None:
            raise RuntimeError("no kernel")
        return HANDLERS["one"](x, x)

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


@numba.jit
def numba_kernel(x):
    return x


class OtherJit(torch.autograd.Function):
    """Another compiler's jit."""

    @staticmethod
    def forward(ctx, x):
        numba_kernel[(1,)](x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


class BackwardOnly(torch.autograd.Function):
    """Triton in the backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        copy[(1,)](dy, dx, dy.numel(), BLOCK=1024)
        return dx


class ForwardOnly(torch.autograd.Function):
    """Triton in the forward alone."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        copy[(1,)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy.clone()


class NotYet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        copy[(1,)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        raise NotImplementedError("inference only")


class Inference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        copy[(1,)](x, y, x.numel(), BLOCK=1024)
        return y
