import torch
import triton
import triton.language as tl


@triton.jit
def _swish_fwd_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    tl.store(y + at, v * tl.sigmoid(v), mask=at < n)


@triton.jit
def _swish_bwd_kernel(x, dy, dx, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    s = tl.sigmoid(v)
    tl.store(dx + at, (s + v * s * (1 - s)) * tl.load(dy + at, mask=at < n), mask=at < n)


def swish_fwd(x):
    y = torch.empty_like(x)
    _swish_fwd_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y


def swish_bwd(x, dy):
    dx = torch.empty_like(x)
    _swish_bwd_kernel[(triton.cdiv(x.numel(), 256),)](x, dy, dx, x.numel(), BLOCK=256)
    return dx
