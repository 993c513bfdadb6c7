"""Offsets of 32 bits at sizes that no test machine holds: nothing is executed, the launch is looked at in points."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir.lower import lower
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.sanitizer.findings import Finding, FindingKind, Findings
from kernel_agent.ir.sanitizer.ranges import may_wrap
from kernel_agent.ir.sanitizer.wraps import find_wraps
from kernel_agent.ir.values import Pointer


def huge(name: str, *size: int) -> Pointer:
    """A pointer to a tensor without memory."""
    tensor = torch.empty(*size, device="meta")
    buffer = Buffer(name, tensor.view(-1), torch.float32, written=True)
    buffer.extents.give(name, tensor)
    return Pointer(buffer, torch.tensor([0]), buffer.extents.view(tensor, name))


def wraps(kernel: Any, grid: int, arguments: list[Any], **constants: Any) -> tuple[Finding, ...]:
    """Findings of a launch over a grid of one dimension."""
    names = kernel.arg_names

    def type_of(value: Any) -> str:
        if isinstance(value, Pointer):
            return "*fp32"
        return "i32" if value < 2**31 else "i64"

    types = {name: type_of(value) for name, value in zip(names, arguments, strict=False)}
    module = lower(
        kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        {(names.index(name),): value for name, value in constants.items()},
    )
    found = Findings()
    find_wraps(module, (grid, 1, 1), arguments, found)
    assert {finding.kind for finding in found.all()} <= {FindingKind.WRAPPED_OFFSET}
    return found.all()


@triton.jit
def _rows(X, Y, stride, N, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, BLOCK)
    start = row * stride  # product
    tl.store(Y + start + cols, tl.load(X + start + cols, mask=cols < N), mask=cols < N)


ROWS, STRIDE = 70_000, 40_000


def test_a_row_times_a_stride_that_leaves_32_bits_is_found_at_the_product_for_every_access():
    found = wraps(_rows, ROWS, [huge("x", ROWS, STRIDE), huge("y", ROWS, STRIDE), STRIDE, 50], BLOCK=64, WIDE=False)
    assert [finding.buffer for finding in found] == ["x", "y"]
    finding = found[0]
    lines, first = inspect.getsourcelines(_rows.fn)
    assert finding.line == first + next(k for k, line in enumerate(lines) if "# product" in line)
    assert finding.program == (ROWS - 1, 0, 0)
    assert finding.offset == (ROWS - 1) * STRIDE
    assert set(finding.variables) == {"start", "cols"}
    assert "row * stride is 69999 * 40000 = 2799960000" in finding.message
    assert f"instead of {(ROWS - 1) * STRIDE}" in finding.message
    assert f"it wraps from row = {-(-(2**31) // STRIDE)} on" in finding.message


def test_a_row_of_64_bits_is_clean():
    assert wraps(_rows, ROWS, [huge("x", ROWS, STRIDE), huge("y", ROWS, STRIDE), STRIDE, 50], BLOCK=64, WIDE=True) == ()


def test_fewer_rows_are_clean():
    rows = 2**31 // STRIDE
    assert (
        wraps(_rows, rows, [huge("x", rows, STRIDE), huge("y", rows, STRIDE), STRIDE, 50], BLOCK=64, WIDE=False) == ()
    )


@triton.jit
def _flat(X, Y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + offsets, tl.load(X + offsets, mask=offsets < n), mask=offsets < n)


@pytest.mark.parametrize(("n", "found"), [(2**31 + 77, ["x", "y"]), (2**31 - 1024, [])])
def test_a_flat_index_wraps_only_beyond_two_billion_elements(n, found):
    findings = wraps(_flat, -(-n // 1024), [huge("x", n), huge("y", n), n], BLOCK=1024)
    assert [finding.buffer for finding in findings] == found


def test_a_lane_that_wraps_behind_its_mask_is_no_finding():
    # The last program's tile ends beyond 2**31, but no lane with such an offset is let through.
    n = 2**31 - 1000
    assert wraps(_flat, -(-n // 1024), [huge("x", n), huge("y", n), n], BLOCK=1024) == ()


@triton.jit
def _columns(X, Y, rows, stride, BLOCK: tl.constexpr, STEPWISE: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    pointers = X + cols
    for row in range(rows):
        if STEPWISE:
            total += tl.load(pointers)
            pointers += stride
        else:
            total += tl.load(X + row * stride + cols)
    tl.store(Y + cols, total)


@pytest.mark.parametrize(("stepwise", "buffers"), [(False, ["x"]), (True, [])], ids=["product", "pointer steps"])
def test_the_last_iteration_of_a_loop_is_looked_at(stepwise, buffers):
    # Pointers are 64 bits wide: moving them row by row never wraps, row * stride does.
    found = wraps(_columns, 4, [huge("x", ROWS, STRIDE), huge("y", 256), ROWS, STRIDE], BLOCK=64, STEPWISE=stepwise)
    assert [finding.buffer for finding in found] == buffers


@triton.jit
def _hashed(X, Y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = (offsets * 1103515245 + 12345) & 0xFFFF
    tl.store(Y + offsets, tl.load(X + slot), mask=offsets < n)


def test_a_hash_wraps_on_purpose():
    assert wraps(_hashed, 1 << 12, [huge("x", 1 << 16), huge("y", 1 << 22), 1 << 22], BLOCK=1024) == ()


@triton.jit
def _returns_early(X, Y, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= n:
        return
    tl.store(Y + row, tl.load(X + row * stride))


def test_programs_that_return_before_the_access_do_not_count():
    arguments = [huge("x", 50_000, STRIDE), huge("y", 50_000), 50_000, STRIDE]
    assert wraps(_returns_early, ROWS, arguments, BLOCK=64) == ()


@triton.jit
def _gathered(X, Rows, Y, stride, BLOCK: tl.constexpr):
    row = tl.load(Rows + tl.program_id(0))
    c = tl.arange(0, BLOCK)
    tl.store(Y + tl.program_id(0) * BLOCK + c, tl.load(X + row * stride + c))


@pytest.mark.parametrize(("row", "found"), [(60_000, ["x"]), (50_000, [])])
def test_rows_that_are_read_from_memory_count_with_their_values(row, found):
    rows = Buffer("rows", torch.tensor([3, row], dtype=torch.int32), torch.int32, written=True)
    module = lower(
        _gathered, {"X": "*fp32", "Rows": "*i32", "Y": "*fp32", "stride": "i32", "BLOCK": "constexpr"}, {(4,): 16}
    )
    findings = Findings()
    pointer = Pointer(rows, torch.tensor([0]))
    find_wraps(module, (2, 1, 1), [huge("x", ROWS, STRIDE), pointer, huge("y", 32), STRIDE], findings)
    assert [finding.buffer for finding in findings.all()] == found


def test_small_tensors_do_not_hide_a_product_that_wraps():
    # 65536 * 65536 is 0 in 32 bits: the last row would be read from the first one, inside of every bound.
    rows = 2**16 + 1
    found = wraps(_rows, rows, [huge("x", 128), huge("y", 128), 2**16, 50], BLOCK=64, WIDE=False)
    assert [finding.buffer for finding in found] == ["x", "y"]


@triton.jit
def _carried(X, Y, n, stride, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(n):
        total += tl.load(X + at + c)
        at += stride
    tl.store(Y + c, total)


@pytest.mark.parametrize(("rows", "found"), [(ROWS, ["x"]), (50_000, [])])
def test_an_offset_that_a_loop_adds_up_is_followed_to_its_last_round(rows, found):
    arguments = [huge("x", rows, STRIDE), huge("y", 256), rows, STRIDE]
    assert [finding.buffer for finding in wraps(_carried, 4, arguments, BLOCK=64)] == found


def test_ranges_settle_an_even_loop_without_looking_at_points():
    module = lower(
        _carried, {"X": "*fp32", "Y": "*fp32", "n": "i32", "stride": "i32", "BLOCK": "constexpr"}, {(4,): 64}
    )
    pointers = [huge("x", 8), huge("y", 8)]
    assert not may_wrap(module, (4, 1, 1), [*pointers, 50_000, STRIDE])
    assert may_wrap(module, (4, 1, 1), [*pointers, ROWS, STRIDE])
