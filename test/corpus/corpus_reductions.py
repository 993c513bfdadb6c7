"""Reductions with combines of their own, over one axis or several values at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _better(value_a, place_a, value_b, place_b):
    first = (value_a > value_b) | ((value_a == value_b) & (place_a < place_b))
    return tl.where(first, value_a, value_b), tl.where(first, place_a, place_b)


@triton.jit
def _argmax_rows(X, BEST, WHERE, LOWEST, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=-float("inf"))
    best, where = tl.reduce((x, c), 0, _better)
    tl.store(BEST + row, best * best)
    tl.store(WHERE + row, where)
    tl.store(LOWEST + row, tl.argmin(tl.where(c < N, x, float("inf")), 0))


def argmax_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    best = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    where, lowest = (torch.empty(x.shape[0], dtype=torch.int32, device=x.device) for _ in range(2))
    _argmax_rows[(x.shape[0],)](x, best, where, lowest, x.shape[1], BLOCK=32)
    return best, where, lowest


@triton.jit
def _moments(mean_a, m2_a, weight_a, mean_b, m2_b, weight_b):
    weight = weight_a + weight_b
    share = weight_b / weight
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * weight_a * share, weight


@triton.jit
def _weighted_moments(X, W, MEAN, VAR, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(X + at)
    w = tl.load(W + at)
    mean, m2, weight = tl.reduce((x, tl.zeros_like(x), w), 1, _moments)
    tl.store(MEAN + tl.arange(0, M), mean)
    tl.store(VAR + tl.arange(0, M), m2 / weight)


def weighted_moments(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    mean, var = (torch.empty(x.shape[0], device=x.device) for _ in range(2))
    _weighted_moments[(1,)](x, w, mean, var, *x.shape)
    return mean, var


def _weighted_reference(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    mean = (x * w).sum(1) / w.sum(1)
    return mean, ((x - mean[:, None]) ** 2 * w).sum(1) / w.sum(1)


@triton.jit
def _spread(low_a, high_a, low_b, high_b):
    return tl.minimum(low_a, low_b), tl.maximum(high_a, high_b)


@triton.jit
def _min_max_scale(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    low, high = tl.reduce(
        (tl.where(c < N, x, float("inf")), tl.where(c < N, x, float("-inf"))), axis=0, combine_fn=_spread
    )
    tl.store(Y + row * N + c, (x - low) / (high - low), mask=c < N)


def min_max_scale(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _min_max_scale[(x.shape[0],)](x, y, x.shape[1], BLOCK=32)
    return y


def _min_max_reference(x: Tensor) -> Tensor:
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    return (x - low) / (high - low)


@triton.jit
def _log_add_exp(a, b):
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _log_partition(X, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    at = (tl.arange(0, M)[:, None, None] * N + tl.arange(0, N)[None, :, None]) * K + tl.arange(0, K)[None, None, :]
    x = tl.load(X + at)
    over_middle = tl.reduce(x, 1, _log_add_exp)
    best = tl.max(over_middle, 1, keep_dims=True)
    out = tl.sum(tl.exp(over_middle - best), 1)
    tl.store(OUT + tl.arange(0, M), tl.log(out) + tl.reshape(best, (M,)))


def log_partition(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], device=x.device)
    _log_partition[(1,)](x, out, *x.shape)
    return out


@triton.jit
def _compose(a, b, c, d, e, f, g, h):
    # product of two 2x2 matrices: not commutative
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


@triton.jit
def _chain_of_matrices(X, OUT, N: tl.constexpr):
    at = X + (tl.program_id(0) * N + tl.arange(0, N)) * 4
    p, q, r, s = tl.reduce((tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)), 0, _compose)
    out = OUT + tl.program_id(0) * 4
    tl.store(out, p)
    tl.store(out + 1, q)
    tl.store(out + 2, r)
    tl.store(out + 3, s)


def chain_of_matrices(x: Tensor) -> Tensor:
    """The product of matrices (rows, n, 2, 2) in order."""
    out = torch.empty((x.shape[0], 2, 2), dtype=x.dtype, device=x.device)
    _chain_of_matrices[(x.shape[0],)](x, out, N=x.shape[1])
    return out


def _chain_reference(x: Tensor) -> Tensor:
    out = x[:, 0]
    for k in range(1, x.shape[1]):
        out = out @ x[:, k]
    return out


@triton.jit
def _integer_reductions(X, SUM, XOR, LARGEST, ANY, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0)
    tl.store(SUM + row, tl.sum(x.to(tl.int64), 0))
    tl.store(XOR + row, tl.xor_sum(x, 0))
    tl.store(LARGEST + row, tl.max(tl.where(c < N, x, -2147483648), 0))
    tl.store(ANY + row, tl.max(((x < 0) & (c < N)).to(tl.int32), 0))


def integer_reductions(x: Tensor) -> tuple[Tensor, ...]:
    rows = x.shape[0]
    total = torch.empty(rows, dtype=torch.int64, device=x.device)
    rest = [torch.empty(rows, dtype=torch.int32, device=x.device) for _ in range(3)]
    _integer_reductions[(rows,)](x, total, *rest, x.shape[1], BLOCK=16)
    return (total, *rest)


def _integer_reference(x: Tensor) -> tuple[Tensor, ...]:
    folded = []
    for row in x.tolist():
        bits = 0
        for value in row:
            bits ^= value
        folded.append(bits)
    return x.long().sum(1), torch.tensor(folded), x.amax(1), (x < 0).any(1).int()


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _geometric(X, Y, Z, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(X + m[:, None] * N + n[None, :])
    tl.store(Y + n, tl.reduce(x, 0, _product))
    # the same element may be the largest in its row and in its column
    tl.store(Z + m, tl.max(x, 1) * tl.max(tl.max(x, 0), 0))


def products_and_peaks(x: Tensor) -> tuple[Tensor, Tensor]:
    y, z = (
        torch.empty(x.shape[1], dtype=x.dtype, device=x.device),
        torch.empty(x.shape[0], dtype=x.dtype, device=x.device),
    )
    _geometric[(1,)](x, y, z, *x.shape)
    return y, z


CASES = [
    *in_dtypes(
        Case(
            "argmax_with_value",
            argmax_rows,
            lambda: (torch.randn(5, 27),),
            lambda x: (x.amax(1) ** 2, x.argmax(1), x.argmin(1)),
        ),
        BF16,
    ),
    Case(
        "welford_weighted",
        weighted_moments,
        lambda: (torch.randn(4, 16) + 2, torch.rand(4, 16) + 0.1),
        _weighted_reference,
    ),
    *in_dtypes(Case("min_max_scale", min_max_scale, lambda: (torch.randn(4, 30),), _min_max_reference), HALF),
    Case("log_partition", log_partition, lambda: (torch.randn(4, 8, 4) * 3,), lambda x: x.flatten(1).logsumexp(1)),
    Case("chain_of_matrices", chain_of_matrices, lambda: (torch.randn(3, 8, 2, 2),), _chain_reference),
    Case(
        "integer_reductions",
        integer_reductions,
        lambda: (torch.randint(-(2**31), 2**31, (4, 13)).to(torch.int32),),
        _integer_reference,
    ),
    Case(
        "products_and_peaks",
        products_and_peaks,
        lambda: (torch.randn(4, 8),),
        lambda x: (x.prod(0), x.amax(1) * x.amax()),
    ),
]
