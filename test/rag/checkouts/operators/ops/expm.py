import torch
import triton
import triton.language as tl
from torch import library

NAME = "ops::exp_minus"


@triton.jit
def exp_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.exp(-tl.load(x + at, mask=at < n)), mask=at < n)


@library.custom_op(NAME, mutates_args=())
def exp_minus(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    exp_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y


@exp_minus.register_fake
def _(x):
    return torch.empty_like(x)
