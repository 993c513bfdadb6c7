"""Bounds are those of the argument, not of its storage; what a stub may do with views of its own stays silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import Finding, FindingKind, execute


def findings(stub: Callable[..., object], *args: Tensor) -> list[Finding]:
    """Findings of one call, all of which must be about bounds."""
    found = list(execute(stub, args).findings)
    assert {finding.kind for finding in found} <= {FindingKind.OUT_OF_BOUNDS}, [str(finding) for finding in found]
    return found


@triton.jit
def _copy_rows(X, Y, stride, N, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    row = tl.program_id(0)
    row_start = row * stride
    cols = tl.arange(0, BLOCK)
    if MASKED:
        x = tl.load(X + row_start + cols, mask=cols < N)
    else:
        x = tl.load(X + row_start + cols)
    tl.store(Y + row * N + cols, x, mask=cols < N)


def copy_rows(masked: bool) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        y = torch.empty(x.shape, device=x.device)
        _copy_rows[(x.shape[0],)](x, y, x.stride(0), x.shape[1], 128, masked)
        return y

    return stub


def test_columns_beyond_a_sliced_argument_are_out_of_bounds_although_there_is_memory():
    wide = torch.randn(5, 160)
    (finding,) = findings(copy_rows(masked=False), wide[:4, 20:120])
    assert (finding.buffer, finding.offset, finding.size, finding.count) == ("x", 100, 400, 4 * 28)
    assert (finding.program, finding.lane) == ((0, 0, 0), (100,))
    assert finding.variables == ("row_start", "cols")
    assert finding.in_storage
    assert "(row_start=0, cols[100]=100)" in finding.message
    assert "element 100 [0, 100]" in finding.message


def test_what_is_read_between_the_rows_of_a_view_is_what_a_device_reads():
    # A finding, but no wrong number: the memory is there.
    wide = torch.randn(3, 128)
    execution = execute(lambda x: copy_rows(masked=False)(x), (wide[:, :100],))
    assert torch.equal(execution.result, wide[:, :100].double())


def test_the_same_kernel_with_a_mask_is_clean():
    assert findings(copy_rows(masked=True), torch.randn(5, 160)[:4, 20:120]) == []


def test_elements_before_a_view_are_outside_of_it():
    @triton.jit
    def shift(X, Y, BLOCK: tl.constexpr):
        c = tl.arange(0, BLOCK)
        tl.store(Y + c, tl.load(X + c - 1))

    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        shift[(1,)](x, y, 8)
        return y

    (finding,) = findings(stub, torch.arange(16.0)[4:12])
    assert (finding.offset, finding.size, finding.lane) == (-1, 8, (0,))


@triton.jit
def _add_heads(Q, K, Out, stride, D, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    k = tl.load(K + row * stride + d, mask=d < D, other=0.0)
    if MASKED:
        q = tl.load(Q + row * stride + d, mask=d < D, other=0.0)
    else:
        q = tl.load(Q + row * stride + d)
    tl.store(Out + row * D + d, q + k, mask=d < D)


def add_heads(masked: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def stub(q: Tensor, k: Tensor) -> Tensor:
        out = torch.empty(q.shape, device=q.device)
        _add_heads[(q.shape[0],)](q, k, out, q.stride(0), q.shape[1], 16, masked)
        return out

    return stub


def test_reading_k_through_the_pointer_of_q_names_both():
    qkv = torch.randn(3, 24)
    (finding,) = findings(add_heads(masked=False), qkv[:, :8], qkv[:, 8:16])
    assert "load through q reaches k, which shares its storage" in finding.message
    assert (finding.buffer, finding.offset, finding.lane) == ("q", 8, (8,))


def test_chunks_that_the_stub_makes_itself_limit_their_pointers_too():
    def stub(qkv: Tensor) -> Tensor:
        q, k, _ = qkv.chunk(3, -1)
        return add_heads(masked=False)(q, k)

    (finding,) = findings(stub, torch.randn(3, 24))
    assert "load through Q reaches K" in finding.message


def test_q_k_and_v_of_one_storage_are_clean_when_each_is_read_through_its_own_pointer():
    qkv = torch.randn(3, 24)
    assert findings(add_heads(masked=True), qkv[:, :8], qkv[:, 8:16]) == []
    assert findings(lambda x: add_heads(masked=True)(*x.chunk(3, -1)[:2]), qkv) == []


@triton.jit
def _walk(X, Y, step_x, step_y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(Y + row * step_y + c, tl.load(X + row * step_x + c, mask=c < N), mask=c < N)


def walk(x: Tensor, y: Tensor, first: Callable[[Tensor], Tensor]) -> None:
    """Copies (rows, columns) through pointers to one part of both tensors."""
    _walk[(x.shape[0],)](first(x), first(y), x.stride(0), y.stride(0), x.shape[-1], 16)


@pytest.mark.parametrize(
    "first",
    [lambda t: t[0], lambda t: t[:1], lambda t: t[0:1, :], lambda t: t.view(-1), lambda t: t.reshape(2, 2, -1)[0, 0]],
    ids=["row", "slice of one", "slice of one row", "flat", "reshaped"],
)
def test_a_stub_may_pass_its_first_row_and_a_stride(first):
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        walk(x, y, first)
        return y

    assert findings(stub, torch.randn(4, 10)) == []


def test_a_row_that_the_caller_gave_is_a_limit():
    def stub(row: Tensor) -> Tensor:
        y = torch.empty(4, 10, device=row.device)
        _walk[(4,)](row, y, 10, 10, 10, 16)
        return y

    (finding,) = findings(stub, torch.randn(4, 10)[0])
    assert (finding.offset, finding.size, finding.program) == (10, 10, (1, 0, 0))


def test_every_other_column_leaves_the_columns_between_them_free_in_a_stubs_own_view():
    @triton.jit
    def both(X, Y, BLOCK: tl.constexpr):
        c = tl.arange(0, BLOCK)
        tl.store(Y + c, tl.load(X + 2 * c) + tl.load(X + 2 * c + 1))

    def stub(x: Tensor) -> Tensor:
        y = torch.empty(8, device=x.device)
        both[(1,)](x[::2], y, 8)
        return y

    assert findings(stub, torch.randn(16)) == []


def test_rows_of_a_padded_allocation_end_where_its_shape_says():
    def stub(x: Tensor, width: int) -> Tensor:
        y = torch.empty_strided(x.shape, (128, 1), device=x.device)
        _walk[(x.shape[0],)](x, y, x.stride(0), y.stride(0), width, 16)
        return y

    assert findings(lambda x: stub(x, 10), torch.randn(4, 10)) == []
    found = findings(lambda x: stub(x, 12), torch.randn(4, 10))
    assert [finding.buffer for finding in found] == ["x", "Y"]
    assert [finding.in_storage for finding in found] == [False, True]


def test_expanded_and_transposed_arguments_are_reached_by_their_strides():
    @triton.jit
    def copy_2d(X, Y, sx, sy, M: tl.constexpr, N: tl.constexpr):
        m = tl.arange(0, M)[:, None]
        n = tl.arange(0, N)[None, :]
        tl.store(Y + m * N + n, tl.load(X + m * sx + n * sy))

    def stub(x: Tensor) -> Tensor:
        y = torch.empty(x.shape, device=x.device)
        copy_2d[(1,)](x, y, x.stride(0), x.stride(1), 4, 8)
        return y

    assert findings(stub, torch.randn(8).expand(4, 8)) == []
    assert findings(stub, torch.randn(8, 4).t()) == []
    assert findings(stub, torch.randn(9, 5)[1:, 1:].t()) == []
    assert findings(stub, torch.randn(4, 1).expand(4, 8)) == []


def test_memory_that_several_arguments_reach_belongs_to_each_of_them():
    shared = torch.randn(20)
    assert findings(add_heads(masked=True), shared[:16].view(2, 8), shared[4:].view(2, 8)) == []
