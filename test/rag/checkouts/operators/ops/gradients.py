"""Backwards stand apart from the operators."""
import torch
import triton
import triton.language as tl

from .expm import NAME
from .tanh import tanh_of


@triton.jit
def minus_product(y, dy, dx, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dx + at, -tl.load(y + at, mask=at < n) * tl.load(dy + at, mask=at < n), mask=at < n)


def keep_output(ctx, inputs, output):
    ctx.save_for_backward(output)


def exp_minus_adjoint(ctx, dy):
    (y,) = ctx.saved_tensors
    dx = torch.empty_like(y)
    minus_product[(triton.cdiv(y.numel(), 256),)](y, dy, dx, y.numel(), BLOCK=256)
    return dx


torch.library.register_autograd(NAME, exp_minus_adjoint, setup_context=keep_output)


@triton.jit
def one_minus_square(y, dy, dx, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(y + at, mask=at < n)
    tl.store(dx + at, (1 - v * v) * tl.load(dy + at, mask=at < n), mask=at < n)


def tanh_adjoint(ctx, dy):
    (y,) = ctx.saved_tensors
    dx = torch.empty_like(y)
    one_minus_square[(triton.cdiv(y.numel(), 256),)](y, dy, dx, y.numel(), BLOCK=256)
    return dx


tanh_of.register_autograd(backward=tanh_adjoint, setup_context=keep_output)
