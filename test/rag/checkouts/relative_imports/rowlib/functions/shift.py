import torch
from torch.autograd import Function

from .. import kernels
from ..kernels import shift as shift_kernels
from ..kernels.sizes import *


class Shift(Function):
    @staticmethod
    def forward(ctx, x, by):
        y = torch.empty_like(x)
        grid = (kernels.sizes.programs(x.numel()),)
        shift_kernels._kernel[grid](x, y, by, x.numel(), BLOCK=TILE)
        ctx.n = x.numel()
        return y

    @staticmethod
    def backward(ctx, dy):
        from ..kernels.unshift import _kernel

        dx = torch.empty_like(dy)
        _kernel[(programs(ctx.n),)](dy, dx, ctx.n, BLOCK=TILE)
        return dx, None
