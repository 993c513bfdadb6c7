"""Kernels that do one kind of arithmetic each; their stubs run on the device and in the executor."""

import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, BLOCK)
    total = tl.zeros((M, M), out_ptr.dtype.element_ty)
    for start in range(0, K, BLOCK):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * M + m[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    tl.store(out_ptr + m[:, None] * M + m[None, :], total)


def dot(a, b, precision, dtype):
    m, k = a.shape
    out = torch.empty(m, m, dtype=dtype, device=a.device)
    dot_kernel[(1,)](a, b, out, k, M=m, BLOCK=64, PRECISION=precision)
    return out


@triton.jit
def cast_kernel(x_ptr, near_ptr, cut_ptr, small_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(near_ptr + i, x.to(near_ptr.dtype.element_ty))
    tl.store(cut_ptr + i, x.to(cut_ptr.dtype.element_ty, fp_downcast_rounding="rtz"))
    tl.store(small_ptr + i, x.to(small_ptr.dtype.element_ty))


def casts(x, dtype, small):
    near, cut = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
    eight = torch.empty_like(x, dtype=small)
    cast_kernel[(1,)](x, near, cut, eight, BLOCK=x.numel())
    return near, cut, eight


@triton.jit
def narrow_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, (x + y) * y)
    tl.store(out_ptr + BLOCK, tl.sum(x, 0))


def narrow(x, y):
    out = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    narrow_kernel[(1,)](x, y, out, BLOCK=x.numel())
    return out
