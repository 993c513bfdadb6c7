"""Values that do not vary over a dimension, or over programs, used where every element counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _reductions(X, S, OUT, M: tl.constexpr, N: tl.constexpr):
    # sums over dimensions along which nothing varies
    s = tl.load(S)
    row = tl.load(X + tl.program_id(0) * N + tl.arange(0, N))[None, :]
    wide = tl.broadcast_to(row, (M, N))
    ones = tl.full((M, N), 1.0, tl.float32)
    total = tl.sum(wide * s, 0) + tl.sum(ones, 0)
    product = tl.reduce(tl.broadcast_to(row, (2, N)), 0, _times)
    running = tl.cumsum(wide, 0)
    average = tl.sum(running) / (M * N)
    peak = tl.max(wide, 0) + tl.max(tl.full((N,), 0.0, tl.float32) + s, 0)
    place = tl.argmax(tl.full((N,), 1.0, tl.float32) * s, 0)
    tl.store(OUT + tl.program_id(0) * N + tl.arange(0, N), total * product + average * peak + place)


def reductions(x: Tensor, s: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _reductions[(x.shape[0],)](x, s, out, M=4, N=x.shape[1])
    return out


def _reductions_reference(x: Tensor, s: Tensor) -> Tensor:
    N = x.shape[1]
    average = x.sum(1, keepdim=True) * (1 + 2 + 3 + 4) / (4 * N)
    return (4 * x * s + 4) * x * x + average * (x + s)


@triton.jit
def _scatters(S, X, OUT, COUNT, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # one number for many elements, many updates of one element
    m, n = tl.program_id(0) * BM + tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    s = tl.load(S)
    live = (m < M) & (n < N) & ((m + n) % 3 != 0)
    tl.store(OUT + m * N + n, tl.zeros((BM, BN), tl.float32) + s, mask=(m < M) & (n < N))
    x = tl.load(X + n + 0 * m, mask=live, other=0.0)
    tl.atomic_add(COUNT + 0 * m + 0 * n, tl.zeros((BM, BN), tl.float32) + s * s, mask=live)
    tl.atomic_add(COUNT + 1 + n + 0 * m, x, mask=live)


def scatters(s: Tensor, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    out = torch.empty((rows, x.numel()), device=x.device)
    count = torch.zeros(1 + x.numel(), device=x.device)
    _scatters[(triton.cdiv(rows, 4),)](s, x, out, count, rows, x.numel(), BM=4, BN=8)
    return out, count


def _scatters_reference(s: Tensor, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    live = ((torch.arange(rows)[:, None] + torch.arange(x.numel())) % 3 != 0).double()
    return s.expand(rows, x.numel()), torch.cat([s * s * live.sum(), x * live.sum(0)])


@triton.jit
def _moves(S, X, OUT, N: tl.constexpr):
    # constants and single numbers through operations that move elements
    n = tl.arange(0, N)
    s = tl.load(S)
    x = tl.load(X + tl.program_id(0) * N + n)
    flat = tl.full((N,), 3.0, tl.float32) * s
    joined = tl.join(flat, x)
    low, high = tl.split(joined)
    woven = tl.interleave(flat, tl.full((N,), 2.0, tl.float32))
    turned = tl.trans(tl.reshape(woven, (N, 2)))
    picked = tl.gather(x, tl.zeros((N,), tl.int32) + tl.program_id(0), 0)
    ordered = tl.sort(flat * 0.5)
    tall = tl.reshape(tl.broadcast_to(x[:, None], (N, 2)), (2, N))
    out = low * high + tl.sum(turned, 0) * picked + tl.flip(ordered, 0) + tl.sum(tall, 0)
    tl.store(OUT + tl.program_id(0) * N + n, out)


def moves(s: Tensor, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _moves[(x.shape[0],)](s, x, out, N=x.shape[1])
    return out


def _moves_reference(s: Tensor, x: Tensor) -> Tensor:
    picked = x.gather(1, torch.arange(x.shape[0])[:, None])
    tall = x.repeat_interleave(2, 1).view(x.shape[0], 2, -1).sum(1)
    return 3 * s * x + (3 * s + 2) * picked + 1.5 * s + tall


@triton.jit
def _products(S, X, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    # operands of a product that are the same in every row or column, or everywhere
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    s = tl.load(S)
    x = tl.load(X + tl.program_id(0) * K + k)
    rows = tl.broadcast_to(x[None, :], (M, K))
    columns = tl.broadcast_to(x[:, None], (K, N))
    constant = tl.full((K, N), 0.5, tl.float32) * s
    acc = tl.dot(rows, constant, input_precision="ieee")
    acc = tl.dot(rows * (m + 1).to(tl.float32)[:, None], columns, acc, input_precision="ieee")
    tl.store(OUT + (tl.program_id(0) * M + m)[:, None] * N + n[None, :], acc)


def products(s: Tensor, x: Tensor) -> Tensor:
    out = torch.empty((x.shape[0], 16, 16), device=x.device)
    _products[(x.shape[0],)](s, x, out, M=16, N=16, K=x.shape[1])
    return out


def _products_reference(s: Tensor, x: Tensor) -> Tensor:
    rows = 0.5 * s * x.sum(1)[:, None] + (x * x).sum(1)[:, None] * torch.arange(1, 17)
    return rows[..., None].expand(-1, -1, 16)


@triton.jit
def _carried(S, X, OUT, LENGTHS, N: tl.constexpr):
    # what a loop starts from is one number; programs leave it after different numbers of steps
    row = tl.program_id(0)
    n = tl.arange(0, N)
    s = tl.load(S)
    state = tl.zeros((N,), tl.float32) + s
    scale = s
    best = tl.full((N,), float("-inf"), tl.float32)
    for k in range(tl.load(LENGTHS + row)):
        x = tl.load(X + k * N + n)
        state = state * 0.5 + x
        scale = scale * 0.75
        best = tl.maximum(best, x * scale)
    if row % 2 == 0:
        out = tl.zeros((N,), tl.float32) + scale
    else:
        out = state
    tl.store(OUT + row * N + n, out * s + tl.where(best == float("-inf"), 0.0, best))


def carried(s: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    out = torch.empty((lengths.numel(), x.shape[1]), device=x.device)
    _carried[(lengths.numel(),)](s, x, out, lengths, N=x.shape[1])
    return out


def _carried_reference(s: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    rows = []
    for row, length in enumerate(lengths.tolist()):
        state, scale, seen = s.expand(x.shape[1]), s, []
        for k in range(length):
            state, scale = state * 0.5 + x[k], scale * 0.75
            seen.append(x[k] * scale)
        best = torch.stack(seen).amax(0) if seen else torch.zeros_like(x[0])
        rows.append((scale.expand(x.shape[1]) if row % 2 == 0 else state) * s + best)
    return torch.stack(rows)


@triton.jit
def _outer_masks(A, B, OUT, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # three dimensions: each operand varies over one or two, each mask over others
    m = tl.arange(0, BM)[:, None, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)[None, :, None]
    k = tl.arange(0, BK)[None, None, :]
    live = (m < M) & (n < N) & (k < K)
    a = tl.load(A + m * K + k + 0 * n, mask=live & (m + k != n), other=1.0)
    b = tl.load(B + n + 0 * (m + k), mask=live & (k > m), other=0.5)
    out = tl.sum(tl.where(live, a * b, 0.0), 2)
    rows = tl.arange(0, BM)[:, None]
    columns = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    tl.store(OUT + rows * N + columns, out, mask=(rows < M) & (columns < N))


def outer_masks(a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.numel()
    out = torch.empty((M, N), device=a.device)
    _outer_masks[(triton.cdiv(N, 4),)](a, b, out, M, N, K, BM=4, BN=4, BK=8)
    return out


def _outer_reference(a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.numel()
    m, n, k = torch.arange(M)[:, None, None], torch.arange(N)[:, None], torch.arange(K)
    left = torch.where(m + k != n, a[:, None], 1.0)
    right = torch.where((k > m) & (n >= 0), b[:, None], 0.5)
    return (left * right).sum(2)


CASES = [
    *in_dtypes(
        Case("reductions_of_constants", reductions, lambda: (torch.randn(3, 8), torch.randn(1)), _reductions_reference)
    ),
    Case("scatters_of_one_number", scatters, lambda: (torch.randn(1), torch.randn(7), 10), _scatters_reference),
    Case("moves_of_constants", moves, lambda: (torch.randn(1), torch.randn(3, 8)), _moves_reference),
    Case("products_of_constants", products, lambda: (torch.randn(1), torch.randn(3, 16)), _products_reference),
    Case(
        "carried_numbers",
        carried,
        lambda: (torch.randn(1), torch.randn(5, 8), torch.tensor([0, 3, 5, 1], dtype=torch.int32)),
        _carried_reference,
    ),
    Case("masks_of_other_dimensions", outer_masks, lambda: (torch.randn(3, 7), torch.randn(6)), _outer_reference),
]
