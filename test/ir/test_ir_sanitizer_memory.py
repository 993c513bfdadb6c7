"""Memory that nobody wrote, pointers into nothing and assertions: a broken kernel and its mended twin for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import Finding, FindingKind, execute


def found(stub: Callable[..., object], *args: Tensor) -> list[Finding]:
    """Findings of one call."""
    return list(execute(stub, args).findings)


@triton.jit
def _copy_to(X, Y, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tl.store(Y + row * stride + cols, tl.load(X + row * stride + cols, mask=cols < n), mask=cols < n)


def copy_rows(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _copy_to[(rows,)](x, y, columns, x.stride(0), 16)
        return y

    return stub


def test_the_first_missing_element_of_an_output_is_named_by_its_index():
    (finding,) = found(copy_rows(4, 7), torch.randn(4, 10))
    assert finding.kind is FindingKind.UNWRITTEN_OUTPUT
    assert "12 of 40 elements of output 0 (Y) were never written, the first is [0, 7]" in finding.message
    assert (finding.lane, finding.offset, finding.count) == ((0, 7), 7, 12)


def test_missing_rows_are_missing_elements():
    (finding,) = found(copy_rows(3, 10), torch.randn(4, 10))
    assert (finding.lane, finding.count) == ((3, 0), 10)


def test_an_output_that_is_written_whole_is_clean():
    assert found(copy_rows(4, 10), torch.randn(4, 10)) == []


def test_a_view_of_what_was_written_has_no_holes():
    assert found(lambda x: copy_rows(4, 7)(x)[:, :7], torch.randn(4, 10)) == []


@triton.jit
def _two_steps(X, Scratch, Y, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(Scratch + pid * BLOCK + c, tl.load(X + pid * BLOCK + c) * 2.0)
    source = (pid + SHIFT) % tl.num_programs(0)
    tl.store(Y + pid * BLOCK + c, tl.load(Scratch + source * BLOCK + c))


def two_steps(shift: int) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        scratch, y = torch.empty_like(x), torch.empty_like(x)
        _two_steps[(2,)](x, scratch, y, 16, shift)
        return y

    return stub


def test_scratch_that_another_program_of_the_launch_writes_is_a_race():
    # Run side by side both programs have written before either reads; on a device the order is open.
    (finding,) = found(two_steps(1), torch.randn(32))
    assert (finding.kind, finding.buffer, finding.program) == (FindingKind.RACE, "Scratch", (0, 0, 0))


def test_scratch_that_the_program_wrote_itself_is_clean():
    assert found(two_steps(0), torch.randn(32)) == []


def test_scratch_of_an_earlier_launch_is_clean_and_unwritten_scratch_is_not():
    def stub(x: Tensor, first: bool) -> Tensor:
        scratch, y = torch.empty_like(x), torch.empty_like(x)
        if first:
            _copy_to[(1,)](x, scratch, 16, 16, 16)
        _copy_to[(1,)](scratch, y, 16, 16, 16)
        return y

    assert found(lambda x: stub(x, first=True), torch.randn(16)) == []
    findings = found(lambda x: stub(x, first=False), torch.randn(16))
    assert [finding.kind for finding in findings] == [FindingKind.UNINITIALIZED_READ]
    assert (findings[0].offset, findings[0].lane, findings[0].count) == (0, (0,), 16)


@triton.jit
def _through_table(Table, Y, BLOCK: tl.constexpr):
    pointer = tl.load(Table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    c = tl.arange(0, BLOCK)
    tl.store(Y + tl.program_id(0) * BLOCK + c, tl.load(pointer + c))


def through_table(offset: int) -> Callable[[Tensor, Tensor], Tensor]:
    def stub(a: Tensor, b: Tensor) -> Tensor:
        y = torch.empty(2, 16, device=a.device)
        table = torch.tensor([a.data_ptr(), b.data_ptr() + offset], dtype=torch.int64, device=a.device)
        _through_table[(2,)](table, y, 16)
        return y

    return stub


def test_pointers_of_a_table_reach_the_tensors_they_were_made_of():
    assert found(through_table(0), torch.randn(16), torch.randn(16)) == []


def test_a_pointer_into_no_tensor_is_wild():
    findings = found(through_table(1 << 50), torch.randn(16), torch.randn(16))
    assert FindingKind.WILD_POINTER in {finding.kind for finding in findings}
    assert str(FindingKind.WILD_POINTER) == "wild pointer"


def test_a_pointer_of_a_table_ends_with_its_tensor():
    (finding,) = found(through_table(4), torch.randn(16), torch.randn(16))
    assert (finding.kind, finding.offset, finding.lane) == (FindingKind.OUT_OF_BOUNDS, 16, (15,))


@triton.jit
def _checked(X, Y, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n, other=1.0)
    tl.device_assert(x > 0.0, "x must be positive")
    tl.store(Y + c, tl.log(x), mask=c < n)


def checked(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _checked[(1,)](x, y, x.numel(), 16, debug=True)
    return y


def test_an_assertion_that_does_not_hold_is_told_with_its_text_and_lane():
    x = torch.ones(10)
    x[3] = -1.0
    findings = [finding for finding in found(checked, x) if finding.kind is FindingKind.ASSERTION]
    assert [(finding.lane, finding.count) for finding in findings] == [((3,), 1)]
    assert "x must be positive" in findings[0].message


def test_an_assertion_that_holds_is_silent():
    assert found(checked, torch.ones(10)) == []
