import torch

from ..kernels import scale_rows, scale_rows_adjoint
from ..kernels.sizes import block_for
from .._checks import contiguous


class RowScale(torch.autograd.Function):
    """y[i, :] = x[i, :] * s[i]."""

    @staticmethod
    @contiguous
    def forward(ctx, x, s):
        y = torch.empty_like(x)
        scale_rows[(x.shape[0],)](x, s, y, x.shape[1], BLOCK=block_for(x.shape[1]))
        ctx.save_for_backward(x, s)
        return y

    @staticmethod
    @contiguous
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        dx, ds = torch.empty_like(x), torch.empty_like(s)
        scale_rows_adjoint[(x.shape[0],)](x, s, dy, dx, ds, x.shape[1], BLOCK=block_for(x.shape[1]))
        return dx, ds
