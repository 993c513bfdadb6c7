import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from triton.language.extra import libdevice


@triton.jit
def tanh_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, libdevice.tanh(tl.load(x + at, mask=at < n)), mask=at < n)


def _tanh(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    wrap_triton(tanh_kernel)[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y


tanh_of = triton_op("ops::tanh", _tanh, mutates_args={})


@triton_op("ops::tanh_scaled", mutates_args={})
def tanh_scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """No backward is registered."""
    y = torch.empty_like(x)
    wrap_triton(tanh_kernel)[(triton.cdiv(x.numel(), 256),)](x * by, y, x.numel(), BLOCK=256)
    return y
