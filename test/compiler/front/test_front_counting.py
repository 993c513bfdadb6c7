"""While loops that count are for loops, and leave in memory what they left; others ask before every trip."""

from __future__ import annotations

import front_checks
import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel


@triton.jit
def counted_kernel(X, Y, T, STEP: tl.constexpr, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    at = X + lanes
    t = tl.program_id(0)
    while t < T:
        total = total * 0.5 + tl.load(at) * t
        at += WIDTH
        t += STEP
    tl.store(Y + tl.program_id(0) * WIDTH + lanes, total + t)


@triton.jit
def halved_kernel(X, Y, T, STEP: tl.constexpr, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    t = T
    while t > 1:
        total += tl.load(X + t * WIDTH + lanes)
        t = t // 2
    tl.store(Y + tl.program_id(0) * WIDTH + lanes, total)


@triton.jit
def moving_kernel(X, Y, T, STEP: tl.constexpr, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    t = 0
    end = T
    while t < end:
        total += tl.load(X + t * WIDTH + lanes)
        t += STEP
        end -= 1
    tl.store(Y + tl.program_id(0) * WIDTH + lanes, total)


def kernel_at(function: triton.JITFunction, trips: int, step: int) -> Kernel:
    def stub(x: torch.Tensor, y: torch.Tensor) -> None:
        function[(2,)](x, y, trips, STEP=step, WIDTH=4)

    (found,) = front_checks.compare(stub, torch.randn(12, 4), torch.zeros(2, 4))
    assert found.error < 1e-6
    return read_launch(found.launch)


@pytest.mark.parametrize(("trips", "step"), [(9, 1), (9, 2), (8, 3), (1, 1), (0, 2)])
def test_a_loop_that_counts_is_a_for_loop(trips: int, step: int) -> None:
    # The counter was read as a number that only memory of earlier trips tells: recurrences written so added all their
    # gradients atomically. What it ends with, of no trip too, is stored here.
    codes = [op.code for op in kernel_at(counted_kernel, trips, step).ops]
    assert Code.FOR in codes
    assert Code.WHILE not in codes


@pytest.mark.parametrize("function", [halved_kernel, moving_kernel])
def test_a_loop_that_counts_otherwise_or_to_a_moving_bound_asks_before_every_trip(
    function: triton.JITFunction,
) -> None:
    assert Code.WHILE in [op.code for op in kernel_at(function, 8, 2).ops]
