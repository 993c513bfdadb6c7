import torch
import triton
import triton.language as tl


def _square(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x * x, mask=at < n)


def _square_adjoint(x_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(dx_ptr + at, 2 * x * tl.load(dy_ptr + at, mask=at < n), mask=at < n)


square_kernel = triton.jit(_square)
square_adjoint_kernel = triton.heuristics({"BLOCK": lambda a: 256 if a["n"] < 4096 else 1024})(
    triton.jit(_square_adjoint)
)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        square_kernel[(triton.cdiv(x.numel(), 512),)](x, y, x.numel(), BLOCK=512)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
        square_adjoint_kernel[grid](x, dy, dx, x.numel())
        return dx
