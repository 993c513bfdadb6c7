"""The product of two vectors: the smallest forward with two gradients that differ."""

import torch
import triton
import triton.language as tl

from kernel_agent.autodiff import autodiff

SWEEP = [{"N": 64}, {"N": 100, "required": False}]
BLOCK = 32


@triton.jit
def product_kernel(X, W, Y, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    # One multiplication per element.
    y = tl.load(X + cols, mask=mask) * tl.load(W + cols, mask=mask)
    tl.store(Y + cols, y, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def product(x, w):
    y = torch.empty_like(x)
    product_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, w, y, x.numel(), BLOCK=BLOCK)
    return y


def make_args(N, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(N, generator=generator).to(device) for _ in range(2))


def reference(x, w):
    return x * w


if __name__ == "__main__":
    print(product(*make_args(8)))
