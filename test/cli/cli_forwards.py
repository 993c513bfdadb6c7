"""A forward small enough that whole runs of the command line stay quick, and backwards for it."""

FORWARD = '''"""Elementwise square with a scale."""
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

SWEEP = [{"N": 40}]


def make_args(N, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=generator).to(device), 3.0


@triton.jit
def square_kernel(X, Y, factor, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N)
    tl.store(Y + at, x * x * factor, mask=at < N)


@autodiff(inputs_require_grad=("x",))
def square(x, factor):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 32),)](x, y, factor, x.numel(), BLOCK=32)
    return y
'''

RIGHT = """The derivative of `factor * x * x` is `2 * factor * x`.

```python
# --- backward ---
@triton.jit
def square_bwd_kernel(X, G, DX, factor, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N)
    g = tl.load(G + at, mask=at < N)
    tl.store(DX + at, 2.0 * factor * x * g, mask=at < N)


def backward(saved, grad_y, needs=None):
    x, y, factor = saved
    g = grad_y.contiguous()
    dx = torch.empty_like(x)
    square_bwd_kernel[(triton.cdiv(x.numel(), 32),)](x, g, dx, factor, x.numel(), BLOCK=32)
    return dx
```
"""

WRONG = RIGHT.replace("2.0 * factor", "factor")
