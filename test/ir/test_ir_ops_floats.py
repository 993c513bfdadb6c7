"""Floats at their edges: ties, bounds, NaN. Gradients there are those torch gives the equivalent operation."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients

from kernel_agent.ir import execute

NAN, INF = math.nan, math.inf


@triton.jit
def _extremes(A, B, Y, n: tl.constexpr, PROPAGATE: tl.constexpr):
    c = tl.arange(0, n)
    a, b = tl.load(A + c), tl.load(B + c)
    tl.store(Y + c, tl.maximum(a, b, propagate_nan=PROPAGATE))
    tl.store(Y + n + c, tl.minimum(a, b, propagate_nan=PROPAGATE))


def _extremes_stub(propagate):
    def stub(a, b):
        y = torch.empty(2 * a.numel(), dtype=a.dtype, device=a.device)
        _extremes[(1,)](a, b, y, a.numel(), propagate)
        return y

    return stub


@pytest.mark.parametrize("propagate", [tl.PropagateNan.NONE, tl.PropagateNan.ALL])
def test_ties_of_maximum_and_minimum_share_the_gradient(propagate):
    # fmax gives all of it to one side, torch.maximum half to each
    a = torch.tensor([1.0, 2.0, 3.0, 0.0, -1.0, 5.0, 5.0, 0.0])
    b = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0, 5.0, 4.0, -0.0])
    check_gradients(
        _extremes_stub(propagate), (a, b), lambda a, b: torch.cat([torch.maximum(a, b), torch.minimum(a, b)])
    )


def test_maximum_drops_nan_unless_told_to_hand_it_on():
    a, b = torch.tensor([NAN, 1.0, NAN, 2.0]), torch.tensor([3.0, NAN, NAN, 4.0])
    dropped = execute(_extremes_stub(tl.PropagateNan.NONE), (a, b)).result
    assert dropped.nan_to_num(nan=-1.0).tolist() == [3.0, 1.0, -1.0, 4.0, 3.0, 1.0, -1.0, 2.0]
    kept = execute(_extremes_stub(tl.PropagateNan.ALL), (a, b)).result
    assert kept.nan_to_num(nan=-1.0).tolist() == [-1.0, -1.0, -1.0, 4.0, -1.0, -1.0, -1.0, 2.0]


def test_the_side_that_is_no_nan_takes_the_gradient():
    a, b = torch.tensor([NAN, 1.0]), torch.tensor([3.0, NAN])
    execution = execute(_extremes_stub(tl.PropagateNan.NONE), (a, b), leaves=(0, 1))
    by_a, by_b = torch.autograd.grad(execution.result.sum(), [execution.leaves[0], execution.leaves[1]])
    assert by_a.tolist() == [0.0, 2.0]
    assert by_b.tolist() == [2.0, 0.0]


@triton.jit
def _clamp(X, Y, low, high, n: tl.constexpr, PROPAGATE: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.clamp(tl.load(X + c), low, high, propagate_nan=PROPAGATE))


def _clamp_stub(propagate):
    def stub(x):
        y = torch.empty_like(x)
        _clamp[(1,)](x, y, -1.0, 1.0, x.numel(), propagate)
        return y

    return stub


def test_a_value_on_the_bound_keeps_its_gradient_under_clamp():
    # min(max(x, low), high) would halve it
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 1.0])
    check_gradients(_clamp_stub(tl.PropagateNan.NONE), (x,), lambda x: x.clamp(-1.0, 1.0))


def test_clamp_of_nan_is_the_lower_bound_unless_it_is_handed_on():
    x = torch.tensor([NAN, 0.5])
    assert execute(_clamp_stub(tl.PropagateNan.NONE), (x,)).result.tolist() == [-1.0, 0.5]
    assert execute(_clamp_stub(tl.PropagateNan.ALL), (x,)).result.isnan().tolist() == [True, False]


@triton.jit
def _row_extremes(X, HIGH, LOW, N: tl.constexpr):
    c = tl.arange(0, N)
    x = tl.load(X + tl.program_id(0) * N + c)
    tl.store(HIGH + tl.program_id(0), tl.max(x, 0))
    tl.store(LOW + tl.program_id(0), tl.min(x, 0))


def _row_extremes_stub(x):
    high, low = (torch.empty(x.shape[0], dtype=x.dtype, device=x.device) for _ in range(2))
    _row_extremes[(x.shape[0],)](x, high, low, x.shape[1])
    return high, low


def test_ties_of_a_reduced_maximum_share_the_gradient():
    x = torch.tensor([[1.0, 4.0, 4.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, -1.0, -1.0, 3.0]])
    check_gradients(_row_extremes_stub, (x,), lambda x: (x.amax(1), x.amin(1)))


def test_a_reduced_maximum_drops_nan_as_the_device_does():
    x = torch.tensor([[1.0, NAN, 4.0, 0.0], [NAN, NAN, NAN, NAN], [-INF, NAN, -INF, NAN]])
    execution = execute(_row_extremes_stub, (x,), leaves=(0,))
    high, low = (value.detach().nan_to_num(nan=77.0, neginf=-99.0).tolist() for value in execution.result)
    assert high == [4.0, 77.0, -99.0]
    assert low == [0.0, 77.0, -99.0]
    (gradient,) = torch.autograd.grad(execution.result[0][0], [execution.leaves[0]])
    assert gradient.nan_to_num(nan=-1.0).tolist() == [[0.0, 0.0, 1.0, 0.0], [0.0] * 4, [0.0] * 4]


@triton.jit
def _kinks(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X + c)
    tl.store(Y + c, tl.abs(x))
    tl.store(Y + n + c, tl.floor(x) * x)
    tl.store(Y + 2 * n + c, tl.ceil(x) * x)
    tl.store(Y + 3 * n + c, x % 0.75)


def test_steps_have_no_gradient_and_the_absolute_value_of_zero_none_either():
    def stub(x):
        y = torch.empty(4 * x.numel(), dtype=x.dtype, device=x.device)
        _kinks[(1,)](x, y, x.numel())
        return y

    def reference(x):
        return torch.cat([x.abs(), x.floor() * x, x.ceil() * x, torch.fmod(x, 0.75)])

    check_gradients(stub, (torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, 2.25, -2.2, 0.0]),), reference)


@triton.jit
def _compare(A, B, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    a, b = tl.load(A + c), tl.load(B + c)
    bits = (a < b).to(tl.int32) + (a <= b).to(tl.int32) * 2 + (a > b).to(tl.int32) * 4
    bits += (a >= b).to(tl.int32) * 8 + (a == b).to(tl.int32) * 16 + (a != b).to(tl.int32) * 32
    tl.store(Y + c, bits)


def test_comparisons_with_nan_are_false_except_unequal():
    def stub(a, b):
        y = torch.empty(a.numel(), dtype=torch.int32, device=a.device)
        _compare[(1,)](a, b, y, a.numel())
        return y

    a, b = torch.tensor([1.0, 2.0, NAN, NAN]), torch.tensor([2.0, 2.0, 1.0, NAN])
    assert execute(stub, (a, b)).result.tolist() == [1 + 2 + 32, 2 + 8 + 16, 32, 32]
