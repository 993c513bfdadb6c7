"""Grids and the size of the device are kept between calls, in a dictionary and in a cached property."""

from functools import cached_property

import torch
import triton
import triton.language as tl


@triton.jit
def _stride_loop(DS, DP, X, Y, DX, DY, ds, dp, n, PRODUCT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        dx = tl.load(DS + at * ds, mask=inside, other=0.0) if SUM else tl.zeros((BLOCK,), dtype=tl.float32)
        dy = dx
        if PRODUCT:
            g = tl.load(DP + at * dp, mask=inside, other=0.0)
            dx += g * tl.load(Y + at, mask=inside, other=0.0)
            dy += g * tl.load(X + at, mask=inside, other=0.0)
        tl.store(DX + at, dx, mask=inside)
        tl.store(DY + at, dy, mask=inside)


class Device:
    @cached_property
    def processors(self):
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


_DEVICE = Device()
_GRIDS: dict = {}


def _grid(n, block):
    key = (n, block)
    if key not in _GRIDS:
        _GRIDS[key] = (max(1, min(triton.cdiv(n, block), _DEVICE.processors, 7)),)
    return _GRIDS[key]


def backward(saved, *grads):
    x, y = saved
    grad_s, grad_p = grads
    dx, dy = (torch.empty_like(t) for t in (x, y))
    options = {"PRODUCT": grad_p is not None, "SUM": grad_s is not None, "BLOCK": 32}
    strides = [0 if g is None else g.stride(0) for g in grads]
    _stride_loop[_grid(x.numel(), 32)](grad_s, grad_p, x, y, dx, dy, *strides, x.numel(), **options)
    return dx, dy
