"""Where the order of float additions is not fixed: found by addresses and programs, not by the chance of a schedule."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import Unordered, execute


def places(stub: Callable[..., object], *args: Tensor) -> tuple[Unordered, ...]:
    """What one call leaves to chance; nothing in these kernels is a finding."""
    execution = execute(stub, args)
    assert not execution.findings, [str(finding) for finding in execution.findings]
    return execution.unordered


@triton.jit
def _add_rows(X, DW, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.atomic_add(DW + c, tl.load(X + row * N + c, mask=c < N), mask=c < N)


def sum_of_rows(x: Tensor) -> Tensor:
    dw = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    _add_rows[(x.shape[0],)](x, dw, x.shape[1], BLOCK=16)
    return dw


def test_float_additions_of_several_programs_to_one_element_have_no_order():
    (place,) = places(sum_of_rows, torch.randn(5, 10))
    assert (place.kernel, place.buffer, place.programs) == ("_add_rows", "DW", 5)
    assert place.line is not None
    assert "adds to DW from 5 programs" in str(place)


def test_float_additions_of_one_program_are_in_order():
    # The twin of the test above: the same kernel and the same atomic, one program.
    assert places(sum_of_rows, torch.randn(1, 10)) == ()


def test_integer_additions_need_no_order():
    # They do not round: every order gives the same bits.
    assert places(sum_of_rows, torch.arange(50, dtype=torch.int32).view(5, 10)) == ()


@triton.jit
def _add_own_rows(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.atomic_add(Y + row * N + c, tl.load(X + row * N + c, mask=c < N), mask=c < N)


def test_atomic_additions_of_which_every_program_has_elements_of_its_own_are_in_order():
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        _add_own_rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
        return y

    assert places(stub, torch.randn(5, 10)) == ()


@triton.jit
def _add_lanes(X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.atomic_add(Y + c // 2, tl.load(X + c))


def test_lanes_of_one_program_that_add_to_one_element_have_no_order():
    # Lanes are threads: the hardware adds them as they come.
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros(8, device=x.device)
        _add_lanes[(1,)](x, y, BLOCK=16)
        return y

    (place,) = places(stub, torch.randn(16))
    assert "from several lanes of one program" in str(place)


@triton.jit
def _largest_of_rows(X, Y, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N, other=0.0)
    tl.atomic_max(Y + c, x, mask=c < N)


def test_extremes_need_no_order():
    # Whoever comes last, the largest stays: atomics as such are no reason.
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[1], device=x.device)
        _largest_of_rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
        return y

    assert places(stub, torch.rand(5, 10)) == ()


@triton.jit
def _locked_sum(X, Y, Lock, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    tl.store(Y + c, tl.load(Y + c, mask=c < N) + x, mask=c < N)
    tl.debug_barrier()
    tl.atomic_xchg(Lock, 0)


def test_additions_under_a_lock_take_turns_in_no_fixed_order():
    # No float atomic anywhere: the lock keeps additions apart and says nothing of which comes first.
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[1], device=x.device)
        lock = torch.zeros(1, dtype=torch.int32, device=x.device)
        _locked_sum[(x.shape[0],)](x, y, lock, x.shape[1], BLOCK=16)
        return y

    (place,) = places(stub, torch.randn(3, 10))
    assert (place.buffer, place.how) == ("Y", "takes turns to add to")


@triton.jit
def _last_one_adds_up(X, Partial, Count, Y, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid, c = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(Partial + pid, tl.sum(tl.load(X + pid * BLOCK + c), 0))
    if tl.atomic_add(Count, 1) == PROGRAMS - 1:
        tl.store(Y, tl.sum(tl.load(Partial + tl.arange(0, PROGRAMS)), 0))


def test_the_last_program_adding_up_what_all_stored_is_in_order():
    # Which program is last is left to chance, and what it adds up is not: partial sums lie where they always lie.
    def stub(x: Tensor) -> Tensor:
        partial, y = torch.empty(4, device=x.device), torch.empty(1, device=x.device)
        _last_one_adds_up[(4,)](x, partial, torch.zeros(1, dtype=torch.int32, device=x.device), y, 8, 4)
        return y

    assert places(stub, torch.randn(32)) == ()
