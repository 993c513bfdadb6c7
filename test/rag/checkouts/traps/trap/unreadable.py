import torch
import importlib

import triton

import somelib.kernels
from somelib.kernels import fused_forward, fused_backward
from . import kernels
from .kernels import copy, gone


class Elsewhere(torch.autograd.Function):
    """Its kernels are another package's."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        fused_forward[(1,)](x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        fused_backward[(1,)](dy, dx)
        return dx


class Gone(torch.autograd.Function):
    """A helper that the checkout does not have."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        copy[(gone(x),)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        copy[(1,)](dy, dx, dy.numel(), BLOCK=1024)
        return dx


class ByName(torch.autograd.Function):
    """Which kernel is launched is known when it runs."""

    @staticmethod
    def forward(ctx, x, name):
        y = torch.empty_like(x)
        getattr(kernels, name)[(1,)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        copy[(1,)](dy, dx, dy.numel(), BLOCK=1024)
        return dx, None


def make_function(block):
    """A class that closes over the local names of a function."""

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.empty_like(x)
            copy[(1,)](x, y, x.numel(), BLOCK=block)
            return y

        @staticmethod
        def backward(ctx, dy):
            dx = torch.empty_like(dy)
            copy[(1,)](dy, dx, dy.numel(), BLOCK=block)
            return dx

    return Local
