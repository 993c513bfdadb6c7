"""Kernels broken on purpose: each defect is found, at the line that has it, and correct kernels stay silent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import ExecOptions, Execution, Finding, FindingKind, execute


def line_of(kernel: Any, mark: str) -> int:
    """Line of this file that carries a comment."""
    lines, start = inspect.getsourcelines(kernel.fn)
    return start + next(place for place, text in enumerate(lines) if f"# {mark}" in text)


def only(execution: Execution, kind: FindingKind) -> Finding:
    """The single finding, which must be of a kind."""
    assert [finding.kind for finding in execution.findings] == [kind]
    return execution.findings[0]


@triton.jit
def _copy_without_mask(X, Y, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c)  # load
    tl.store(Y + c, x, mask=c < 20)


def copy_without_mask(x: Tensor) -> Tensor:
    y = torch.empty(20, device=x.device)
    _copy_without_mask[(2,)](x, y, BLOCK=16)
    return y


def test_load_past_the_end_is_reported_with_kernel_line_buffer_and_program():
    finding = only(execute(copy_without_mask, (torch.randn(20),)), FindingKind.OUT_OF_BOUNDS)
    assert finding.kernel == "_copy_without_mask"
    assert finding.line == line_of(_copy_without_mask, "load")
    assert (finding.buffer, finding.offset, finding.size) == ("x", 20, 20)
    assert finding.program == (1, 0, 0)
    assert finding.count == 12
    assert finding.file == __file__


@triton.jit
def _read_before_start(X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c - 1))


def test_a_value_read_out_of_bounds_is_nan_and_the_run_goes_on():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _read_before_start[(1,)](x, y, BLOCK=8)
        return y

    execution = execute(stub, (torch.arange(8.0),))
    assert execution.result[0].isnan()
    assert execution.result[1:].tolist() == [0, 1, 2, 3, 4, 5, 6]


@triton.jit
def _write_past_end(X, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(X + c, 1.0, mask=c <= n)  # store


def test_store_past_the_end_is_reported_and_dropped():
    def stub(x: Tensor) -> None:
        _write_past_end[(1,)](x, x.numel(), BLOCK=16)

    execution = execute(stub, (torch.zeros(10),))
    assert only(execution, FindingKind.OUT_OF_BOUNDS).line == line_of(_write_past_end, "store")
    assert execution.mutated == ("x",)


@triton.jit
def _plain_sum(X, Y, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N)
    y = tl.load(Y + c, mask=c < N)  # read
    tl.store(Y + c, x + y, mask=c < N)  # write


def test_sum_without_atomics_is_a_race():
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[1], device=x.device)
        _plain_sum[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
        return y

    execution = execute(stub, (torch.randn(3, 10),))
    assert {finding.kind for finding in execution.findings} == {FindingKind.RACE}
    assert execution.findings[0].line == line_of(_plain_sum, "write")
    assert execution.findings[0].buffer == "Y"


@triton.jit
def _forgets_the_row(X, Y, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N)
    tl.store(Y + c, x, mask=c < N)  # write


def test_two_programs_that_store_different_values_race():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x[0])
        _forgets_the_row[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
        return y

    finding = only(execute(stub, (torch.randn(3, 10),)), FindingKind.RACE)
    assert finding.line == line_of(_forgets_the_row, "write")


@triton.jit
def _neighbour(X, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n)
    left = tl.load(X + c - 1, mask=(c < n) & (c > 0), other=0.0)
    tl.store(X + c, x + left, mask=c < n)  # write


def test_in_place_update_that_reads_its_neighbour_races():
    def stub(x: Tensor) -> None:
        _neighbour[(3,)](x, x.numel(), BLOCK=16)

    finding = only(execute(stub, (torch.randn(40),)), FindingKind.RACE)
    assert finding.line == line_of(_neighbour, "write")
    assert finding.offset in (15, 31)


@triton.jit
def _reads_what_a_loop_wrote(X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    p = tl.program_id(0)
    tl.store(Y + p * BLOCK + c, tl.load(X + p * BLOCK + c))
    tl.store(X + p * BLOCK + c, tl.load(Y + (1 - p) * BLOCK + c))  # read


def test_reading_the_other_programs_output_in_the_same_launch_races():
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        _reads_what_a_loop_wrote[(2,)](x, y, BLOCK=16)
        return y

    execution = execute(stub, (torch.randn(32),))
    assert only(execution, FindingKind.RACE).line == line_of(_reads_what_a_loop_wrote, "read")


@triton.jit
def _clears_what_others_wrote(X, Y, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    tl.store(Y + tl.arange(0, PROGRAMS * BLOCK), 0.0)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c))  # write


def test_clearing_in_every_program_races_with_what_one_of_them_stores():
    # Executed side by side the result is right; on a device a late program clears what an early one has stored.
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _clears_what_others_wrote[(2,)](x, y, BLOCK=16, PROGRAMS=2)
        return y

    finding = only(execute(stub, (torch.randn(32),)), FindingKind.RACE)
    assert finding.line == line_of(_clears_what_others_wrote, "write")


@triton.jit
def _adds_up_and_reads(X, S, Y, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c)
    tl.atomic_add(S, tl.sum(x, 0))
    tl.store(Y + c, x / tl.load(S))  # read


@pytest.mark.parametrize("programs", [2, 4])
def test_reading_a_sum_that_other_programs_still_add_to_races(programs):
    # Executed side by side every program reads the whole sum; on a device it reads what has arrived so far.
    def stub(x: Tensor) -> Tensor:
        y, s = torch.empty_like(x), torch.zeros(1, device=x.device)
        _adds_up_and_reads[(programs,)](x, s, y, BLOCK=16)
        return y

    finding = only(execute(stub, (torch.rand(16 * programs),)), FindingKind.RACE)
    assert finding.line == line_of(_adds_up_and_reads, "read")


def test_a_single_program_may_read_what_it_added():
    def stub(x: Tensor) -> Tensor:
        y, s = torch.empty_like(x), torch.zeros(1, device=x.device)
        _adds_up_and_reads[(1,)](x, s, y, BLOCK=16)
        return y

    assert not execute(stub, (torch.rand(16),)).findings


@triton.jit
def _counts_without_atomics(Y):
    tl.store(Y, tl.load(Y) + 1.0)  # write


def test_counting_programs_without_atomics_races():
    # Nothing here varies over programs, so that it is executed once for all; on a device updates are lost.
    def stub(y: Tensor) -> None:
        _counts_without_atomics[(3,)](y)

    finding = only(execute(stub, (torch.zeros(1),)), FindingKind.RACE)
    assert finding.line == line_of(_counts_without_atomics, "write")


@triton.jit
def _accumulate(X, Y, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.atomic_add(Y + c, tl.load(X + tl.program_id(0) * N + c, mask=c < N), mask=c < N)  # add


def accumulate_into(make: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        y = make(x.shape[1], device=x.device)
        _accumulate[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
        return y

    return stub


def test_accumulating_into_empty_memory_is_an_uninitialised_read():
    finding = only(execute(accumulate_into(torch.empty), (torch.randn(3, 10),)), FindingKind.UNINITIALIZED_READ)
    assert finding.line == line_of(_accumulate, "add")


def test_accumulating_into_zeros_is_clean():
    assert execute(accumulate_into(torch.zeros), (torch.randn(3, 10),)).findings == ()


@pytest.mark.parametrize("fill", ["zero_", "slices", "copy_"])
def test_memory_that_torch_filled_counts_as_written(fill):
    def make(n: int, device: torch.device) -> Tensor:
        y = torch.empty(n, device=device)
        if fill == "zero_":
            y.zero_()
        elif fill == "copy_":
            y.copy_(torch.zeros(n, device=device))
        else:
            y[:5] = 0.0
            y[5:].fill_(0.0)
        return y

    assert execute(accumulate_into(make), (torch.randn(3, 10),)).findings == ()


def test_memory_that_torch_filled_in_part_is_unwritten_in_the_rest():
    def make(n: int, device: torch.device) -> Tensor:
        y = torch.empty(n, device=device)
        y[:7] = 0.0
        return y

    finding = only(execute(accumulate_into(make), (torch.randn(3, 10),)), FindingKind.UNINITIALIZED_READ)
    assert finding.offset == 7


@triton.jit
def _half(X, Y, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n), mask=c < n // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_output_that_is_not_fully_written_is_reported(dtype):
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _half[(1,)](x, y, x.numel(), BLOCK=16)
        return y

    finding = only(execute(stub, (torch.ones(10, dtype=dtype),)), FindingKind.UNWRITTEN_OUTPUT)
    assert finding.count == 5


def test_an_unwritten_output_is_named_by_its_place_among_all_outputs():
    # The gate reads the gradient's name off the place: a None before it must count.
    def stub(x: Tensor) -> tuple[None, Tensor]:
        y = torch.empty_like(x)
        _half[(1,)](x, y, x.numel(), BLOCK=16)
        return None, y

    finding = only(execute(stub, (torch.ones(10),)), FindingKind.UNWRITTEN_OUTPUT)
    assert "output 1 " in finding.message


def test_changed_arguments_are_named_even_when_nested():
    def stub(saved: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
        saved[1].mul_(2.0)
        return saved[0] * scale

    execution = execute(stub, ((torch.ones(3), torch.ones(3)), torch.ones(3)))
    assert execution.mutated == ("saved[1]",)


def test_sanitizing_can_be_switched_off_but_bounds_cannot():
    execution = execute(copy_without_mask, (torch.randn(20),), {}, options=ExecOptions(sanitize=False))
    only(execution, FindingKind.OUT_OF_BOUNDS)
