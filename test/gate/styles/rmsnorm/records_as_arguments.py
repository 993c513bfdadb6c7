"""Tensors with their strides in named tuples, through an operator's wrapper, with assertions in the kernel."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton


class Rows(NamedTuple):
    data: torch.Tensor
    stride: int
    step: int


@triton.jit
def _load(rows, row, columns, mask):
    return tl.load(rows.data + row * rows.stride + columns * rows.step, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _bwd(dy, x, dx, w, statistics, size, eps: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.static_assert(BLOCK >= 1)
    tl.device_assert(size <= BLOCK, "a row does not fit")
    mask = at < size
    rstd = tl.load(statistics[0] + row)
    normed = _load(x, row, at, mask) * rstd
    g = _load(dy, row, at, mask)
    weighted = g * tl.load(w + at, mask=mask, other=0.0)
    out = (weighted - normed * tl.sum(weighted * normed) / size) * rstd
    tl.store(dx.data + row * dx.stride + at * dx.step, out, mask=mask)
    tl.atomic_add(statistics[1] + at, g * normed, mask=mask)


def backward(saved, dy):
    x, w, rstd = saved
    M, N = x.shape
    padded = torch.empty(M, N + 3, dtype=x.dtype, device=x.device)
    dx = padded[:, 1 : N + 1]
    dw = torch.full((N,), 0.0, device=x.device)
    rows = [Rows(t, t.stride(0), t.stride(1)) for t in (dy, x, dx)]
    kernel = wrap_triton(_bwd)
    kernel[(M,)](*rows, w, (rstd, dw), N, eps=1e-6, BLOCK=triton.next_power_of_2(N))
    return torch.Tensor.contiguous(dx), dw.to(dtype=w.dtype, non_blocking=True)
