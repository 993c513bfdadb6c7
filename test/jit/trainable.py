"""Stubs as a user's package has them: kernels in one module, what they need in another, no SWEEP anywhere."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from trainable_parts import FACTOR, halved, tile_of

SMALL = 100


@triton.jit
def scaled_kernel(X, W, Y, N, x_m, x_n, CUBE: tl.constexpr, HAS_W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_m + at * x_n, mask=at < N, other=0.0)
    y = x * x * x if CUBE else halved(x)
    if HAS_W:
        y *= tl.load(W + at, mask=at < N, other=0.0)
    tl.store(Y + row * N + at, y, mask=at < N)


def scaled(x, w=None, *, cube=False):
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    scaled_kernel[(M,)](
        x, w, y, N, x.stride(0), x.stride(1), CUBE=cube, HAS_W=w is not None, BLOCK=tile_of(N), num_warps=FACTOR * 2
    )
    return y


@triton.jit
def square_kernel(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(Y + at, x * x, mask=at < n)


@triton.jit
def cube_kernel(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(Y + at, x * x * x, mask=at < n)


def by_size(x):
    y = torch.empty_like(x)
    n = x.numel()
    if n < SMALL:
        square_kernel[(triton.cdiv(n, 64),)](x, y, n, BLOCK=64)
    else:
        cube_kernel[(triton.cdiv(n, 64),)](x, y, n, BLOCK=64)
    return y


@triton.jit
def windows_kernel(X, Y, step, BLOCK: tl.constexpr):
    window = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + window * step + at)
    tl.store(Y + window, tl.sum(x * x, axis=0))


def windows(x, step):
    count = (x.numel() - 8) // step + 1
    y = torch.empty((count,), dtype=x.dtype, device=x.device)
    windows_kernel[(count,)](x, y, step, BLOCK=8)
    return y


def squared_in_place(x):
    square_kernel[(triton.cdiv(x.numel(), 64),)](x, x, x.numel(), BLOCK=64)
    return x


@triton.jit
def cut_kernel(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(X + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True)
    tl.store(Y + at, (bits & -8192).to(tl.float32, bitcast=True), mask=at < n)


def cut(x):
    y = torch.empty_like(x)
    cut_kernel[(triton.cdiv(y.numel(), 64),)](x, y, y.numel(), BLOCK=64)
    return y


@triton.jit
def picked_kernel(X, Index, Y, D, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    source = tl.load(Index + row)
    x = tl.load(X + source * D + at, mask=at < D, other=0.0)
    tl.store(Y + row * D + at, x * x, mask=at < D)


def picked(x, index):
    x = x.contiguous()
    y = torch.empty((index.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    picked_kernel[(index.numel(),)](x, index, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def gate_kernel(X, Z, Y, N, x_m, z_m, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + row * x_m + at, mask=at < N, other=0.0)
    z = tl.load(Z + row * z_m + at, mask=at < N, other=0.0)
    tl.store(Y + row * N + at, x * tl.sigmoid(z), mask=at < N)


def packed_gate(xz):
    x, z = xz.chunk(2, dim=-1)
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    gate_kernel[(M,)](x, z, y, N, x.stride(0), z.stride(0), BLOCK=tile_of(N))
    return y


@triton.jit
def penalty_kernel(X, Y, n, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    y = x * x if ORDER == 2 else tl.exp(x * ORDER)
    tl.store(Y + at, y, mask=at < n)


def penalty(x, order):
    y = torch.empty_like(x)
    penalty_kernel[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), ORDER=order, BLOCK=32)
    return y


@triton.jit
def leak_kernel(X, Y, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    y = x * STEPS
    if STEPS > 3:
        y = tl.exp(y)
    tl.store(Y + at, y, mask=at < n)


def leak(x, steps):
    y = torch.empty_like(x)
    leak_kernel[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), STEPS=steps, BLOCK=32)
    return y


class Powers(NamedTuple):
    square: torch.Tensor
    cube: torch.Tensor


def powers(x):
    square, cube = torch.empty_like(x), torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 32),)](x, square, x.numel(), BLOCK=32)
    cube_kernel[(triton.cdiv(x.numel(), 32),)](x, cube, x.numel(), BLOCK=32)
    return Powers(square, cube)


def forgetful(x):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)


def detached(x):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 32),)](x.detach(), y, x.numel(), BLOCK=32)
    return y
