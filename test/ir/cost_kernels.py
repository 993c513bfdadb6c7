"""Kernels whose traffic and arithmetic can be counted by hand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add(X, Y, Z, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n)
    y = tl.load(Y + c, mask=c < n)
    tl.store(Z + c, x + y, mask=c < n)


def add(x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), 256),)](x, y, z, x.numel(), BLOCK=256)
    return z


@triton.jit
def _softmax_row(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + row * N + c, e / tl.sum(e, 0), mask=c < N)


def softmax_row(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _softmax_row[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def _matmul(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a = A + m[:, None] * K + k[None, :]
    b = B + k[:, None] * N + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        rest = k < K - start
        acc = tl.dot(
            tl.load(a, (m < M)[:, None] & rest[None, :], 0.0), tl.load(b, rest[:, None] & (n < N)[None, :], 0.0), acc
        )
        a += BK
        b += BK * N
    tl.store(C + m[:, None] * N + n[None, :], acc, (m < M)[:, None] & (n < N)[None, :])


def matmul(a: Tensor, b: Tensor, BM: int = 32, BN: int = 64, BK: int = 16) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=torch.float32, device=a.device)
    _matmul[(triton.cdiv(M, BM), triton.cdiv(N, BN))](a, b, c, M, N, K, BM, BN, BK)
    return c


@triton.jit
def _column_sums(X, S, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.atomic_add(S + n, tl.sum(tl.load(X + m[:, None] * N + n[None, :], inside, 0.0), 0), n < N)


def column_sums(x: Tensor) -> Tensor:
    s = torch.zeros(x.shape[1], device=x.device)
    _column_sums[(triton.cdiv(x.shape[0], 16),)](x, s, *x.shape, BM=16, BN=triton.next_power_of_2(x.shape[1]))
    return s


@triton.jit
def _causal_sums(X, Y, T, BLOCK: tl.constexpr):
    q = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, (q + 1) * BLOCK, BLOCK):
        acc += tl.load(X + start + tl.arange(0, BLOCK))
    tl.store(Y + q * BLOCK + tl.arange(0, BLOCK), acc)


def causal_sums(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _causal_sums[(x.numel() // 32,)](x, y, x.numel(), BLOCK=32)
    return y


@triton.jit
def _argmax_rows(X, Index, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    column = tl.arange(0, BLOCK)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + n, mask=n < N, other=float("-inf"))
        column = tl.where(x > best, n, column)
        best = tl.where(x > best, x, best)
    tl.store(Index + row, tl.min(tl.where(best == tl.max(best, 0), column, N), 0))


def argmax_rows(x: Tensor) -> Tensor:
    index = torch.empty(x.shape[0], device=x.device, dtype=torch.int32)
    _argmax_rows[(x.shape[0],)](x, index, x.shape[1], BLOCK=16)
    return index


@triton.jit
def _gather_rows(X, Index, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    source = tl.load(Index + row)
    tl.store(Y + row * N + c, tl.load(X + source * N + c, c < N), c < N)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    y = torch.empty(index.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    _gather_rows[(index.numel(),)](x, index, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def _bucket(X, Index, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Index + c, (tl.load(X + c, c < n) > 0).to(tl.int64), c < n)


def bucket_then_gather(x: Tensor) -> Tensor:
    index = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    _bucket[(1,)](x, index, x.shape[0], BLOCK=triton.next_power_of_2(x.shape[0]))
    return gather_rows(x, index)


@triton.jit
def _append_positive(X, Y, Count):
    x = tl.load(X + tl.program_id(0))
    if x > 0:
        place = tl.atomic_add(Count, 1)
        tl.store(Y + place, x)


def append_positive(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    _append_positive[(x.numel(),)](x, y, count)
    return y


@triton.jit
def _halving(X, Y, n):
    i = tl.program_id(0)
    total = 0.0
    step = i + 1
    while step > 0:
        total += tl.load(X + step)
        step = step // 2
    tl.store(Y + i, total)


def halving(x: Tensor) -> Tensor:
    y = torch.empty(8, device=x.device)
    _halving[(8,)](x, y, x.numel())
    return y


@triton.jit
def _triangle(X, Y, n):
    total = 0.0
    place = 0
    for k in range(n):
        place += k
        total += tl.load(X + place)
    tl.store(Y + tl.program_id(0), total)


def triangle(x: Tensor, n: int) -> Tensor:
    """Reads the triangular numbers below n (n + 1) / 2: the step of the address grows in each iteration."""
    y = torch.empty(2, device=x.device)
    _triangle[(2,)](x, y, n)
    return y


@triton.jit
def _strided_copy(X, Y, stride, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c * stride, c < n), c < n)


def strided_copy(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _strided_copy[(triton.cdiv(x.shape[0], 64),)](x, y, x.stride(0), x.shape[0], BLOCK=64)
    return y


def normalised_add(x: Tensor, y: Tensor) -> Tensor:
    """A launch between torch functions."""
    total = add(x.contiguous(), y)
    return total / total.sum()


@triton.jit
def _from_median_bits(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    bits = tl.load(X + row * N + c, mask=c < N, other=float("inf")).to(tl.int32, bitcast=True)
    low, high = tl.min(bits, 0), tl.max(tl.where(c < N, bits, tl.min(bits, 0)), 0)
    for _ in range(32):
        middle = low + (high - low) // 2
        enough = tl.sum((bits <= middle).to(tl.int32), 0) > N // 2
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    place = tl.sum(tl.where(bits == high, c, 0), 0)
    tl.store(Y + row, tl.load(X + row * N + place))


def median_by_bits(x: Tensor) -> Tensor:
    """Medians (M,) of rows of different positive floats, found by halving ranges of their bits."""
    y = torch.empty(x.shape[0])
    _from_median_bits[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
