"""Texts of users' files that the tests of this room read."""

from __future__ import annotations

SCALED = '''"""y = x * w, elementwise; w may be None."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def scaled_kernel(X, W, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < n) * tl.load(W + i, mask=i < n), mask=i < n)


@autodiff(inputs_require_grad=(0, 1))
def scaled(x, w):
    y = torch.empty_like(x)
    scaled_kernel[(triton.cdiv(x.numel(), 64),)](x, w, y, x.numel(), BLOCK=64)
    return y


SWEEP = [dict(n=70), dict(n=1 << 24, required=False)]


def make_args(n, device, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g).to(device), torch.randn(n, generator=g).to(device)


def reference(x, w):
    return x * w
'''
