import torch

from .kernels import copy


class Reserved(torch.autograd.Function):
    """Reserved of licences/lib/reserved.py."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        copy[(1,)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        copy[(1,)](dy, dx, dy.numel(), BLOCK=1024)
        return dx
