import torch
import triton
import triton.language as tl

import fastlib.utils.compat
from fastlib.utils.compat import at_least, custom_bwd, custom_fwd

if at_least((2, 0)):
    try:
        from triton.language.extra.libdevice import rsqrt
    except ModuleNotFoundError:
        from triton.language.extra.cuda.libdevice import rsqrt
else:
    from triton.language.math import rsqrt


def _rms_kernel(X, W, Y, R, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N, other=0.0)
    r = rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(R + row, r)
    tl.store(Y + row * N + cols, x * r * tl.load(W + cols, mask=cols < N), mask=cols < N)


_rms_kernel = triton.jit(_rms_kernel)
_rms_kernel = triton.heuristics({"num_warps": lambda a: 4 if a["BLOCK"] < 2048 else 8})(_rms_kernel)


@fastlib.utils.compat.kernel
def _rms_adjoint(X, W, R, DY, DX, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    keep = cols < N
    x, r = tl.load(X + row * N + cols, mask=keep, other=0.0), tl.load(R + row)
    g = tl.load(DY + row * N + cols, mask=keep, other=0.0) * tl.load(W + cols, mask=keep, other=0.0)
    tl.store(DX + row * N + cols, r * (g - x * r * r * tl.sum(g * x, axis=0) / N), mask=keep)


def rms_norm_forward(x, w, eps):
    y, r = torch.empty_like(x), x.new_empty(x.shape[0])
    _rms_kernel[(x.shape[0],)](x, w, y, r, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y, r


def rms_norm_backward(x, w, r, dy):
    dx = torch.empty_like(x)
    _rms_adjoint[(x.shape[0],)](x, w, r, dy, dx, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return dx


class FastRMSNormFunction(torch.autograd.Function):
    """RMSNorm with a frozen weight."""

    @staticmethod
    @custom_fwd
    def forward(ctx, X: torch.Tensor, W: torch.Tensor, eps: float = 1e-6):
        Y, R = rms_norm_forward(X, W, eps)
        ctx.save_for_backward(X, W, R)
        return Y

    @staticmethod
    @custom_bwd
    def backward(ctx, dY):
        X, W, R = ctx.saved_tensors
        return rms_norm_backward(X, W, R, dY), None, None


class Module(torch.nn.Module):
    class Inner(torch.autograd.Function):
        """Inside of a class."""

        @staticmethod
        def forward(ctx, x):
            return rms_norm_forward(x, x, 0.0)[0]

        @staticmethod
        def backward(ctx, dy):
            return rms_norm_backward(dy, dy, dy, dy)

    def forward(self, x):
        return FastRMSNormFunction.apply(x, self.weight)
