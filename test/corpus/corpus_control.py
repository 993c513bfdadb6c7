"""Loops and branches that depend on data: trips, early exits, nested calls, and what the host decides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes


@triton.jit
def _cube_root(X, Y, STEPS, tolerance):
    row = tl.program_id(0)
    x = tl.load(X + row)
    y = x
    steps = 0
    while (tl.abs(y * y * y - x) > tolerance) & (steps < 30):
        y = y - (y * y * y - x) / (3.0 * y * y)
        steps += 1
    tl.store(Y + row, y)
    tl.store(STEPS + row, steps)


def cube_root(x: Tensor) -> tuple[Tensor, Tensor]:
    y, steps = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int32, device=x.device)
    _cube_root[(x.numel(),)](x, y, steps, 1e-3)
    return y, steps


def _cube_root_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    roots, counts = [], []
    for value in x:
        y, steps = value, 0
        while abs((y**3 - value).item()) > 1e-3 and steps < 30:
            y, steps = y - (y**3 - value) / (3 * y * y), steps + 1
        roots.append(y)
        counts.append(steps)
    return torch.stack(roots), torch.tensor(counts)


@triton.jit
def _until_budget(X, BUDGET, Y, USED, N):
    # stops in the middle of a row: the flag plays the part of break
    row = tl.program_id(0)
    budget = tl.load(BUDGET + row)
    total = 0.0
    used = 0
    going = True
    for k in range(N):
        if going:
            x = tl.load(X + row * N + k)
            if total + x * x > budget:
                going = False
            else:
                total += x * x
                used += 1
    tl.store(Y + row, total * budget)
    tl.store(USED + row, used)


def until_budget(x: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    y, used = torch.empty_like(budget), torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    _until_budget[(x.shape[0],)](x, budget, y, used, x.shape[1])
    return y, used


def _until_budget_reference(x: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    totals, counts = [], []
    for row, limit in zip(x, budget, strict=True):
        total, used = torch.zeros((), dtype=torch.float64), 0
        for value in row:
            if total + value * value > limit:
                break
            total, used = total + value * value, used + 1
        totals.append(total * limit)
        counts.append(used)
    return torch.stack(totals), torch.tensor(counts)


@triton.jit
def _interpolate_table(X, KNOTS, VALUES, Y, n, K, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.full((BLOCK,), 0, tl.int32) + (K - 1)
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        right = tl.load(KNOTS + middle) <= x
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    left_knot = tl.load(KNOTS + low)
    share = (x - left_knot) / (tl.load(KNOTS + low + 1) - left_knot)
    left = tl.load(VALUES + low)
    tl.store(Y + o, left + share * (tl.load(VALUES + low + 1) - left), mask=o < n)


def interpolate_table(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _interpolate_table[(triton.cdiv(x.numel(), 16),)](x, knots, values, y, x.numel(), knots.numel(), BLOCK=16, STEPS=4)
    return y


def _interpolate_reference(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    low = (torch.searchsorted(knots.detach(), x.detach(), right=True) - 1).clamp(0, knots.numel() - 2)
    share = (x - knots[low]) / (knots[low + 1] - knots[low])
    return values[low] + share * (values[low + 1] - values[low])


@triton.jit
def _find_segment(STARTS, segments, place):
    low = 0
    high = segments
    while low < high:
        middle = (low + high) // 2
        if tl.load(STARTS + middle + 1) <= place:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _scale_segments(X, STARTS, SCALE, Y, segments, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    segment = _find_segment(STARTS, segments, row)
    c = tl.arange(0, BLOCK)
    tl.store(Y + row * BLOCK + c, tl.load(X + row * BLOCK + c) * tl.load(SCALE + segment))


def scale_segments(x: Tensor, starts: Tensor, scale: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _scale_segments[(x.shape[0],)](x, starts, scale, y, scale.numel(), BLOCK=x.shape[1])
    return y


@triton.jit(noinline=True)
def _norm_of(X, base, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + base + c, mask=c < n, other=0.0)
    return tl.sqrt(tl.sum(x * x, 0) + 1.0)


@triton.jit
def _squash(x, limit):
    if limit > 1.0:
        return x / (1.0 + tl.abs(x))
    return x * limit


@triton.jit
def _nested_calls(X, LIMIT, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    norm = _norm_of(X, row * N, N, BLOCK)
    limit = tl.load(LIMIT + row)
    if limit < 0.0:
        tl.store(Y + row, norm)
        return
    tl.store(Y + row, _squash(norm * limit, limit) + _norm_of(X, 0, N, BLOCK))


def nested_calls(x: Tensor, limit: Tensor) -> Tensor:
    y = torch.empty_like(limit)
    _nested_calls[(x.shape[0],)](x, limit, y, x.shape[1], BLOCK=16)
    return y


def _nested_reference(x: Tensor, limit: Tensor) -> Tensor:
    norm = (x.square().sum(1) + 1).sqrt()
    z = norm * limit
    return torch.where(limit < 0, norm, torch.where(limit > 1, z / (1 + z.abs()), z * limit) + norm[0])


@triton.jit
def _collatz(START, X, Y, LONGEST: tl.constexpr):
    row = tl.program_id(0)
    value = tl.load(START + row)
    x = tl.load(X + row)
    y = x
    steps = 0
    while value != 1 and steps < LONGEST:
        if value % 2 == 0:
            value = value // 2
            y = y * 0.5 + x
        else:
            value = 3 * value + 1
            for _ in range(value % 5):
                y = y * x
        steps += 1
    tl.store(Y + row, y)


def collatz(start: Tensor, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _collatz[(x.numel(),)](start, x, y, LONGEST=12)
    return y


def _collatz_reference(start: Tensor, x: Tensor) -> Tensor:
    rows = []
    for value, number in zip(start.tolist(), x, strict=True):
        y, steps = number, 0
        while value != 1 and steps < 12:
            if value % 2 == 0:
                value, y = value // 2, y * 0.5 + number
            else:
                value = 3 * value + 1
                y = y * number ** (value % 5)
            steps += 1
        rows.append(y)
    return torch.stack(rows)


@triton.jit
def _damp(X, Y, n, factor, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    tl.store(Y + o, x * factor - x * x * x * 0.015625, mask=o < n)


def damp_until_small(x: Tensor) -> Tensor:
    """The host reads a number back and decides how often to launch."""
    n = x.numel()
    launches = 0
    while x.abs().max().item() > 1.0 and launches < 20:
        y = torch.empty_like(x)
        _damp[(triton.cdiv(n, 32),)](x, y, n, 0.875, BLOCK=32)
        x = y
        launches += 1
    return x * launches


def _damp_reference(x: Tensor) -> Tensor:
    launches = 0
    while x.abs().max().item() > 1.0 and launches < 20:
        x, launches = 0.875 * x - x**3 / 64, launches + 1
    return x * launches


@triton.jit
def _newton_inverse(A, Y, STEPS, D: tl.constexpr):
    i, j = tl.arange(0, D)[:, None], tl.arange(0, D)[None, :]
    base = tl.program_id(0) * D * D
    a = tl.load(A + base + i * D + j)
    rows = tl.max(tl.sum(tl.abs(a), 1), 0)
    columns = tl.max(tl.sum(tl.abs(a), 0), 0)
    y = tl.trans(a) / (rows * columns)
    error = 0.0
    for _ in range(STEPS):
        residual = tl.dot(a, y, input_precision="ieee")
        error = tl.sum(tl.abs(residual))
        y = 2.0 * y - tl.dot(y, residual, input_precision="ieee")
    tl.store(Y + base + i * D + j, y + error)


def newton_inverse(a: Tensor, steps: int) -> Tensor:
    y = torch.empty_like(a)
    _newton_inverse[(a.shape[0],)](a, y, steps, D=a.shape[1])
    return y


def _newton_reference(a: Tensor, steps: int) -> Tensor:
    y = a.mT / (a.abs().sum(2).amax(1) * a.abs().sum(1).amax(1))[:, None, None]
    error = torch.zeros(())
    for _ in range(steps):
        residual = a @ y
        error, y = residual.abs().sum((1, 2))[:, None, None], 2 * y - y @ residual
    return y + error


@triton.jit
def _triangle(X, Y, N, BLOCK: tl.constexpr):
    # programs that have nothing to do leave at once; the inner trip count differs in each step
    row = tl.program_id(0)
    if row % 3 == 1:
        return
    c = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(row, N, 2):
        part = tl.zeros((BLOCK,), tl.float32)
        for j in range(i, row - 1, -1):
            part += tl.load(X + j * BLOCK + c)
        acc = acc + part * part
    tl.store(Y + row * BLOCK + c, acc)


def triangle(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    _triangle[(x.shape[0],)](x, y, x.shape[0], BLOCK=x.shape[1])
    return y


def _triangle_reference(x: Tensor) -> Tensor:
    rows = []
    for row in range(x.shape[0]):
        parts = [x[row : i + 1].sum(0) ** 2 for i in range(row, x.shape[0], 2)]
        rows.append(torch.zeros_like(x[0]) if row % 3 == 1 else sum(parts))
    return torch.stack(rows)


def _table_args() -> tuple[Tensor, Tensor, Tensor]:
    knots = torch.rand(14).cumsum(0)
    return torch.rand(40) * (knots[-1] - knots[0]) + knots[0], knots, torch.randn(14)


CASES = [
    Case(
        "while_newton_cube_root",
        cube_root,
        lambda: (torch.tensor([1.0, 2.0, 50.0, 0.25, 1e4, 1.0]),),
        _cube_root_reference,
    ),
    Case(
        "for_with_break_flag",
        until_budget,
        lambda: (torch.randn(6, 9), torch.tensor([0.01, 1.0, 3.0, 5.0, 100.0, 2.0])),
        _until_budget_reference,
    ),
    Case("binary_search_interpolation", interpolate_table, _table_args, _interpolate_reference),
    *in_dtypes(
        Case(
            "binary_search_while",
            scale_segments,
            lambda: (torch.randn(10, 8), torch.tensor([0, 3, 3, 7, 10], dtype=torch.int32), torch.randn(4)),
            lambda x, starts, scale: x * scale.repeat_interleave(starts.diff())[:, None],
        ),
        torch.bfloat16,
    ),
    Case(
        "nested_calls_and_returns",
        nested_calls,
        lambda: (torch.randn(5, 13), torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0])),
        _nested_reference,
    ),
    Case("collatz_divergence", collatz, lambda: (torch.arange(1, 12), torch.rand(11) + 0.5), _collatz_reference),
    Case("host_reads_item", damp_until_small, lambda: (torch.rand(70) * 3,), _damp_reference),
    Case("newton_inverse_carried", newton_inverse, lambda: (torch.randn(2, 16, 16), 4), _newton_reference),
    Case("triangular_loops", triangle, lambda: (torch.randn(8, 16),), _triangle_reference),
]
