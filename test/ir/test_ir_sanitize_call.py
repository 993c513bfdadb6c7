"""`sanitize`: findings are reported and never raised, and a report reads well."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent import sanitize
from kernel_agent.errors import InputError
from kernel_agent.ir import FindingKind
from kernel_agent.ir.sanitizer.sanitizer_report import EXPLANATIONS


@triton.jit
def _copy(X, Y, n, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + lanes, mask=lanes < n + LIMIT)
    tl.store(Y + lanes, x, mask=lanes < n)


def copy(x: Tensor, limit: int = 0) -> Tensor:
    y = torch.empty_like(x)
    _copy[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), 16, limit)
    return y


def test_a_clean_call_says_what_ran():
    report = sanitize(copy, torch.randn(40))
    assert report.clean
    assert str(report) == "copy: clean in 1 launch (_copy[3, 1, 1])"


def test_a_finding_is_told_with_place_numbers_variables_program_and_lane():
    report = sanitize(copy, torch.randn(40), limit=3)
    assert report.kinds == (FindingKind.OUT_OF_BOUNDS,)
    head, kind, finding = str(report).splitlines()
    assert head == "copy: 1 finding in 1 launch (_copy[3, 1, 1])"
    assert kind == "out of bounds: an access outside of what its argument reaches"
    line = _copy.fn.__code__.co_firstlineno + 3
    assert finding == (
        f"  _copy, test_ir_sanitize_call.py:{line}: load outside of x: element 40, but it has 40 (lanes[8]=40); "
        "program (2, 0, 0), lane [8] (3 accesses)"
    )


def test_the_arguments_are_not_changed():
    x = torch.ones(8)
    sanitize(lambda x: x.mul_(2.0), x)
    assert x.tolist() == [1.0] * 8


def test_what_the_stub_raises_is_told_after_what_was_found():
    def stub(x: Tensor) -> Tensor:
        y = copy(x, limit=3)
        raise ValueError("no luck")
        return y

    report = sanitize(stub, torch.randn(40))
    assert not report.clean
    assert [finding.kind for finding in report.findings] == [FindingKind.OUT_OF_BOUNDS]
    assert str(report.stop).startswith("ValueError: no luck (test_ir_sanitize_call.py:")


def test_a_kernel_that_cannot_be_run_is_not_clean():
    @triton.jit
    def broken(X):
        tl.store(X, unknown_name)  # noqa: F821

    def stub(x: Tensor) -> None:
        broken[(1,)](x)

    report = sanitize(stub, torch.zeros(1))
    assert not report.clean
    assert "unknown_name" in str(report)


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(InputError, match="a Tensor cannot be sanitized"):
        sanitize(torch.zeros(1))


def test_every_kind_has_words_of_its_own_and_an_explanation():
    words = [str(kind) for kind in FindingKind]
    assert len(set(words)) == len(words)
    assert set(EXPLANATIONS) == set(FindingKind)
    for kind in FindingKind:
        others = [str(other) for other in FindingKind if other is not kind]
        assert not any(other in EXPLANATIONS[kind] for other in others), kind


@triton.jit
def _rows(X, Y, stride, N, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, BLOCK)
    tl.store(Y + row * stride + cols, tl.load(X + row * stride + cols, mask=cols < N), mask=cols < N)


def rows(x: Tensor, wide: bool) -> Tensor:
    y = torch.empty_like(x)
    _rows[(x.shape[0],)](x, y, x.stride(0), x.shape[1], 64, wide)
    return y


def test_a_call_of_any_size_is_judged_without_its_memory():
    # 11 GB in float32: neither the argument nor what the stub allocates exists.
    x = torch.empty(70_000, 40_000, device="meta")
    report = sanitize(rows, x, wide=False)
    assert [finding.buffer for finding in report.of(FindingKind.WRAPPED_OFFSET)] == ["x", "Y"]
    assert "wrapped offset" in str(report)
    assert "only 32-bit offsets were judged" in report.notes[0]


def test_the_same_call_with_64_bits_finds_nothing():
    report = sanitize(rows, torch.empty(70_000, 40_000, device="meta"), wide=True)
    assert report.clean
    assert str(report).startswith("rows: nothing found in 1 launch (_rows[70000, 1, 1])")


def test_what_a_stub_allocates_counts_before_it_is_allocated():
    def stub(size: int) -> Tensor:
        return rows(torch.empty(size, device="cuda").view(-1, 40_000), wide=False)

    assert sanitize(stub, 70_000 * 40_000).kinds == (FindingKind.WRAPPED_OFFSET,)
