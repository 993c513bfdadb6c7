"""Control flow that differs between programs: exact values and gradients, and no lane touches what it must not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor


@triton.jit
def _newton(X, Y, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0)
    x = tl.load(X + offset)
    guess = x
    steps = 0
    while (tl.abs(guess * guess - x) > 1e-3) & (steps < 20):
        guess = 0.5 * (guess + x / guess)
        steps += 1
    tl.store(Y + offset, guess)


def newton(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _newton[(x.numel(),)](x, y, x.numel(), BLOCK=1)
    return y


def _newton_reference(x: Tensor) -> Tensor:
    results = []
    for value in x:
        guess, steps = value, 0
        while abs((guess * guess - value).item()) > 1e-3 and steps < 20:
            guess, steps = 0.5 * (guess + value / guess), steps + 1
        results.append(guess)
    return torch.stack(results)


def test_while_loop_runs_a_different_number_of_times_in_each_program():
    x = torch.tensor([1.0, 2.0, 50.0, 0.25, 1e4])
    check_gradients(newton, (x,), _newton_reference)


@triton.jit
def _ragged_sum(X, LENGTHS, Y, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(LENGTHS + row)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + c, mask=c < length, other=0.0)
        acc = acc * 0.5 + x * x
    tl.store(Y + row, tl.sum(acc, 0))


def ragged_sum(x: Tensor, lengths: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _ragged_sum[(x.shape[0],)](x, lengths, y, x.stride(0), BLOCK=8)
    return y


def _ragged_reference(x: Tensor, lengths: Tensor) -> Tensor:
    rows = []
    for row, length in zip(x, lengths.tolist(), strict=True):
        padded = torch.cat([row[:length], row.new_zeros(-length % 8)]).reshape(-1, 8)
        acc = row.new_zeros(8)
        for part in padded:
            acc = acc * 0.5 + part * part
        rows.append(acc.sum())
    return torch.stack(rows)


def test_for_loop_with_bounds_that_differ_between_programs():
    lengths = torch.tensor([0, 3, 8, 20, 17], dtype=torch.int32)
    check_gradients(ragged_sum, (torch.randn(5, 24), lengths), _ragged_reference)


@triton.jit
def _early(X, Y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = tl.load(X + row * BLOCK)
    if first < 0:
        return
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * BLOCK + c)
    if row == 2:
        tl.store(Y + row * BLOCK + c, x * 3.0)
        return
    tl.store(Y + row * BLOCK + c, x / first)


def early(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    _early[(x.shape[0],)](x, y, x.numel(), BLOCK=x.shape[1])
    return y


def test_early_return_leaves_rows_untouched():
    x = torch.randn(6, 8)
    x[:, 0] = torch.tensor([1.0, -1.0, 2.0, -3.0, 0.5, 4.0])

    def reference(x: Tensor) -> Tensor:
        scaled = torch.where((torch.arange(6) == 2)[:, None], x * 3.0, x / x[:, :1])
        return torch.where(x[:, :1] < 0, 0.0, scaled)

    check_gradients(early, (x,), reference)


@triton.jit
def _branches(X, Y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * BLOCK + c)
    total = tl.sum(x, 0)
    if total > 0:
        y = tl.log(total) * x
        for _ in range(row):
            y = y * x
    else:
        y = x / total
        if row % 2 == 0:
            y = y + total
    tl.store(Y + row * BLOCK + c, y)


def branches(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _branches[(x.shape[0],)](x, y, BLOCK=x.shape[1])
    return y


def test_divergent_if_with_a_loop_inside():
    # log of a negative total is NaN: it must not be evaluated by programs that take the other branch
    def reference(x: Tensor) -> Tensor:
        rows = []
        for row, values in enumerate(x):
            total = values.sum()
            if total.item() > 0:
                rows.append(total.log() * values * values**row)
            else:
                rows.append(values / total + (total if row % 2 == 0 else 0.0))
        return torch.stack(rows)

    check_gradients(branches, (torch.randn(7, 4),), reference)


@triton.jit(noinline=True)
def _scaled(x, factor):
    return x * factor, x + factor


@triton.jit
def _calls(X, Y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * BLOCK + c)
    y = x
    if row > 1:
        a, b = _scaled(tl.sum(x, 0), 3.0)
        y = x * a * b
    tl.store(Y + row * BLOCK + c, y)


def calls(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _calls[(x.shape[0],)](x, y, BLOCK=x.shape[1])
    return y


def test_device_function_that_is_not_inlined():
    execution = check_gradients(
        calls,
        (torch.randn(4, 8),),
        lambda x: torch.where(torch.arange(4) > 1, 3 * x.sum(1) * (x.sum(1) + 3), 1)[:, None] * x,
    )
    assert any(op.name == "tt.call" for op in execution.launches[0].module.all_ops)


@triton.jit
def _choose_pointer(A, B, Y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    source = A
    if row % 2 == 1:
        source = B
    tl.store(Y + row * BLOCK + c, tl.load(source + row * BLOCK + c) * 2.0)


def choose_pointer(a: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(a)
    _choose_pointer[(a.shape[0],)](a, b, y, BLOCK=a.shape[1])
    return y


def test_programs_that_read_from_different_buffers():
    args = (torch.randn(5, 8), torch.randn(5, 8))
    check_gradients(choose_pointer, args, lambda a, b: 2 * torch.where((torch.arange(5) % 2 == 1)[:, None], b, a))


@triton.jit
def _grid(X, Y):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(Y + place, tl.load(X + place) * (x + 10 * y + 100 * z))


def grid(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _grid[x.shape[::-1]](x, y)
    return y


def test_program_ids_of_a_three_dimensional_grid():
    z, y, x = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    check_gradients(grid, (torch.randn(2, 3, 4),), lambda t: t * (x + 10 * y + 100 * z))
