"""Loops that are long inside one program are recorded in segments: the same gradients, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir import ExecOptions, execute

_TIGHT = ExecOptions(memory=1 << 14)


@dataclass(frozen=True)
class Recorded:
    """One run with gradients."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    """For two cotangents in turn, through one recording."""
    saved: int
    """Bytes that autograd kept between forward and backward."""


def record(stub: Callable[..., object], args: tuple[object, ...], options: ExecOptions) -> Recorded:
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    leaves = [place for place, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        execution = execute(stub, args, {}, leaves=leaves, options=options)
    assert execution.findings == ()
    outputs = [leaf for leaf in tree_leaves(execution.result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients: list[Tensor] = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        cotangents = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
        gradients += torch.autograd.grad(outputs, list(execution.leaves.values()), cotangents, retain_graph=True)
    return Recorded([output.detach() for output in outputs], gradients, saved)


def check_segments(stub: Callable[..., object], *args: object, bitwise: bool = True) -> None:
    """In tight memory less is kept, and every bit of outputs and gradients stays the same.

    Gradients that are summed over segments are summed in another order: not `bitwise`, they agree to 1e-12.
    """
    whole, cut = record(stub, args, ExecOptions()), record(stub, args, _TIGHT)
    assert cut.saved < whole.saved / 2, "nothing was cut: the test has no power"
    for ours, theirs in zip(cut.outputs, whole.outputs, strict=True):
        assert torch.equal(ours, theirs)
    for place, (ours, theirs) in enumerate(zip(cut.gradients, whole.gradients, strict=True)):
        close = torch.equal(ours, theirs) if bitwise else torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
        assert close, f"gradient {place}: {(ours - theirs).abs().max()}"
        assert bool(theirs.any()), f"gradient {place} is zero: the test has no power"


@triton.jit
def _scan(A, X, W, Y, T, D: tl.constexpr):
    d = tl.arange(0, D)
    w = tl.load(W + d)
    h = tl.zeros((D,), tl.float32)
    base = tl.program_id(0) * T * D
    for t in range(T):
        a = tl.load(A + base + t * D + d)
        h = h * tl.sigmoid(a) + w * tl.load(X + base + t * D + d)
        tl.store(Y + base + t * D + d, h)


def scan(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    B, T, D = x.shape
    y = torch.empty_like(x)
    _scan[(B,)](a, x, w, y, T, D=D)
    return y


def test_a_scan_of_one_program_keeps_carried_and_captured_values_differentiable():
    # `w` is loaded before the loop and read in every segment: its gradient is a sum over segments
    check_segments(scan, torch.randn(1, 300, 8), torch.randn(1, 300, 8), torch.randn(8), bitwise=False)


def test_a_recorded_scan_agrees_with_torch():
    a, x, w = torch.randn(2, 90, 8), torch.randn(2, 90, 8), torch.randn(8)
    ours = record(scan, (a, x, w), _TIGHT)
    exact = [value.double().requires_grad_() for value in (a, x, w)]
    h, steps = torch.zeros(2, 8, dtype=torch.float64), []
    for t in range(90):
        h = h * exact[0][:, t].sigmoid() + exact[2] * exact[1][:, t]
        steps.append(h)
    cotangent = torch.randn((2, 90, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.autograd.grad(torch.stack(steps, 1), exact, cotangent)
    for name, got, want in zip("axw", ours.gradients, wanted, strict=False):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"d{name}: {text}")


@triton.jit
def _recurrence_in_memory(X, S, Y, T, D: tl.constexpr):
    d = tl.arange(0, D)
    for t in range(1, T):
        before = tl.load(Y + (t - 1) * D + d)
        state = tl.load(S + d)
        tl.store(S + d, state * before + tl.load(X + t * D + d))
        tl.store(Y + t * D + d, tl.sin(state) + before * 0.5)
    last = tl.load(S + d)
    tl.store(S + d, last * last)  # what the segments left is overwritten before the backward begins


def recurrence_in_memory(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y, state = x * 0.1, s * 1.0
    _recurrence_in_memory[(1,)](x, state, y, x.shape[0], D=x.shape[1])
    return y, state


def test_loads_of_what_earlier_iterations_stored_get_exact_gradients():
    # S is overwritten by every iteration and Y read one later: a replay on the wrong contents gives other values
    check_segments(recurrence_in_memory, torch.randn(200, 4).cos(), torch.randn(4))


@triton.jit
def _two_loops(X, S, Y, T, D: tl.constexpr):
    d = tl.arange(0, D)
    for t in range(T):
        tl.atomic_add(S + d, tl.load(X + t * D + d) * tl.load(S + d))
    for t in range(T):
        h = tl.load(S + d)
        for i in range(3):
            h = tl.cos(h + i) * tl.load(X + t * D + d)
        tl.store(Y + t * D + d, h)
        tl.store(S + d, h + 1.0)


def two_loops(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y, state = torch.empty_like(x), s * 1.0
    _two_loops[(1,)](x, state, y, x.shape[0], D=x.shape[1])
    return y, state


def test_two_loops_on_one_buffer_with_atomics_and_a_loop_inside():
    check_segments(two_loops, torch.randn(150, 4) * 0.1, torch.randn(4))


@triton.jit
def _until_large(X, Y, D: tl.constexpr):
    d = tl.arange(0, D)
    x = tl.load(X + tl.program_id(0) * D + d)
    h, n = x, 0
    while tl.sum(h * h, 0) < 1e6:
        h = h * 1.01 + tl.sin(h) * 0.001
        n += 1
    tl.store(Y + tl.program_id(0) * D + d, h + n)


def until_large(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _until_large[(x.shape[0],)](x, y, D=x.shape[1])
    return y


def test_programs_leave_a_while_loop_in_the_middle_of_a_segment():
    check_segments(until_large, torch.randn(1, 16) * torch.tensor([[1.0]]))
    check_segments(until_large, torch.randn(3, 16) * torch.tensor([[1.0], [7.0], [30.0]]))


@triton.jit
def _ragged(X, LENGTHS, Y, T, D: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, D)
    h = tl.zeros((D,), tl.float32)
    for t in range(tl.load(LENGTHS + row)):
        h = h * 0.9 + tl.load(X + (row * T + t) * D + d)
        if t % 3 == row % 3:
            h = h * h * 0.1
    tl.store(Y + row * D + d, h)


def ragged(x: Tensor, lengths: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], x.shape[2], device=x.device)
    _ragged[(x.shape[0],)](x, lengths, y, x.shape[1], D=x.shape[2])
    return y


def test_programs_that_run_different_numbers_of_iterations():
    check_segments(ragged, torch.randn(4, 120, 4), torch.tensor([120, 7, 0, 93]))


@triton.jit
def _locked_mean(X, MEAN, COUNT, LOCK, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N, other=0.0)
    while tl.atomic_cas(LOCK, 0, 1) == 1:
        pass
    count = tl.load(COUNT)
    mean = tl.load(MEAN + c, mask=c < N)
    tl.store(MEAN + c, mean + (x - mean) / (count + 1), mask=c < N)
    tl.store(COUNT, count + 1)
    tl.atomic_xchg(LOCK, 0)


def locked_mean(x: Tensor) -> Tensor:
    mean, count = torch.zeros(x.shape[1], device=x.device), torch.zeros(1, device=x.device)
    lock = torch.zeros(1, dtype=torch.int32, device=x.device)
    _locked_mean[(x.shape[0],)](x, mean, count, lock, x.shape[1], BLOCK=8)
    return mean * mean


def test_programs_that_run_one_by_one_are_recorded_in_segments_too():
    # a replay must find the lock open and the count of its own turn
    check_segments(locked_mean, torch.randn(64, 8))


def test_a_part_of_the_gradients_can_be_asked_for_in_any_order():
    # the journal of changes is walked to and fro; memory must come back to the same state every time
    args = (torch.randn(200, 4).cos(), torch.randn(4))
    execution = execute(recurrence_in_memory, args, {}, leaves=(0, 1), options=_TIGHT)
    (y, state), (x, s) = execution.result, execution.leaves.values()
    first = torch.autograd.grad(state.sum(), [s], retain_graph=True)
    both = torch.autograd.grad(y.sum() + state.sum(), [x, s], retain_graph=True)
    again = torch.autograd.grad(state.sum(), [s], retain_graph=True)
    assert torch.equal(first[0], again[0])
    whole = execute(recurrence_in_memory, args, {}, leaves=(0, 1))
    wanted = torch.autograd.grad(whole.result[0].sum() + whole.result[1].sum(), list(whole.leaves.values()))
    assert torch.equal(both[0], wanted[0])
    assert torch.equal(both[1], wanted[1])


def test_the_longer_the_loop_the_less_is_kept_per_iteration():
    short, long = (record(scan, (*torch.randn(2, 1, T, 8), torch.randn(8)), _TIGHT).saved for T in (200, 1600))
    assert long < 4 * short


@pytest.mark.parametrize("memory", [1 << 10, 1 << 12, 1 << 20])
def test_any_budget_gives_the_same_gradients(memory):
    args = (torch.randn(2, 60, 8), torch.randn(2, 60, 8), torch.randn(8))
    whole, cut = record(scan, args, ExecOptions()), record(scan, args, ExecOptions(memory=memory))
    for name, ours, theirs in zip("axw" * 2, cut.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"d{n}: {text}")


@triton.jit
def _running_maximum(X, Y, T, D: tl.constexpr):
    d = tl.arange(0, D)
    top = 0.0
    for t in range(T):
        x = tl.load(X + t * D + d)
        top = top * 0.5 + tl.max(x * 2.0, 0)
        tl.store(Y + t, top)


def running_maximum(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _running_maximum[(1,)](x, y, x.shape[0], D=x.shape[1])
    return y


def test_equal_maxima_share_their_gradient_in_every_segment():
    # constants are captured too, and carried values start as one: neither has a gradient to be computed
    x = torch.randn(200, 8)
    x[:, 3] = x[:, 5] = x.amax(1) + 1.0
    check_segments(running_maximum, x)
    (gradient,) = record(running_maximum, (x,), _TIGHT).gradients[:1]
    assert torch.equal(gradient[:, 3], gradient[:, 5])
    assert not bool(gradient[:, :3].any())
