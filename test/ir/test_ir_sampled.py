"""A few programs of a launch give what they give among all others; where they do not, sampling is refused."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import FindingKind, execute
from kernel_agent.ir.sampled import CannotSample, execute_sampled


@triton.jit
def _softmax_scaled(X, W, Y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * columns + c, mask=c < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    w = tl.load(W + c, mask=c < columns)
    tl.store(Y + row * columns + c, w * e / tl.sum(e, 0), mask=c < columns)


def softmax_scaled(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _softmax_scaled[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(50, 21), torch.randn(21)


def test_rows_of_the_chosen_programs_are_exact_and_no_other_is_claimed():
    args = arguments()
    sampled = execute_sampled(softmax_scaled, args, programs=4)
    (known,) = sampled.known
    assert known.any(1).nonzero().flatten().tolist() == [0, 16, 33, 49]
    assert known.all(1).sum() == 4
    whole = execute(softmax_scaled, args).result
    assert torch.equal(sampled.execution.result[known], whole[known])
    assert str(sampled.shares[0]) == "4 of 50 programs of _softmax_scaled"
    assert sampled.execution.findings == ()


def test_gradients_of_the_chosen_rows_are_exact_for_every_input():
    # the weights get a sum over all rows: right only because the cotangent is zero on rows that were not computed
    args = arguments()
    sampled = execute_sampled(softmax_scaled, args, leaves=[0, 1], programs=3)
    (cotangent,) = sampled.cotangents(seed=1)
    whole = execute(softmax_scaled, args, leaves=[0, 1])
    found = torch.autograd.grad(sampled.execution.result, list(sampled.execution.leaves.values()), cotangent)
    expected = torch.autograd.grad(whole.result, list(whole.leaves.values()), cotangent)
    for name, got, want in zip(("x", "w"), found, expected, strict=True):
        assert want.abs().max() > 0
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-14), f"gradient of {name}"


@triton.jit
def _row_sum(X, Y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(Y + row, tl.sum(tl.load(X + row * columns + c, mask=c < columns, other=0.0), 0))


@triton.jit
def _minus_total(X, S, Y, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    r, c = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    total = tl.sum(tl.load(S + r, mask=r < rows, other=0.0), 0)
    x = tl.load(X + row * columns + c, mask=c < columns)
    tl.store(Y + row * columns + c, x - total, mask=c < columns)


def minus_total(x: Tensor) -> Tensor:
    rows, columns = x.shape
    s, y = torch.empty(rows, device=x.device), torch.empty_like(x)
    _row_sum[(rows,)](x, s, columns, BLOCK=32)
    _minus_total[(rows,)](x, s, y, rows, columns, ROWS=64, BLOCK=32)
    return y


def test_a_launch_that_a_later_one_reads_is_run_whole():
    # its unwritten sums would be NaN, or, after a `zeros`, silently wrong
    x = torch.randn(50, 21)
    sampled = execute_sampled(minus_total, (x,), programs=2)
    assert [share.programs for share in sampled.shares] == [50, 2]
    known = sampled.known[0]
    assert torch.equal(sampled.execution.result[known], execute(minus_total, (x,)).result[known])


@triton.jit
def _add_rows(X, Y, columns, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.atomic_add(Y + c, tl.load(X + tl.program_id(0) * columns + c, mask=c < columns), mask=c < columns)


def sums_by_atomics(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[1], device=x.device)
    _add_rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=32)
    return y


def in_place(x: Tensor) -> Tensor:
    _row_sum[(x.shape[0],)](x, x, x.shape[1], BLOCK=32)
    return x


def doubled(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _row_sum[(x.shape[0],)](x, y, x.shape[1], BLOCK=32)
    return 2 * y


@pytest.mark.parametrize(
    ("stub", "words"),
    [(sums_by_atomics, "atomics"), (in_place, "holds values already"), (doubled, "torch function mul")],
)
def test_results_that_no_few_programs_decide_are_refused(stub, words):
    with pytest.raises(CannotSample, match=words):
        execute_sampled(stub, (torch.randn(50, 21),))


def test_what_the_chosen_programs_do_wrong_is_found_and_unwritten_rows_are_no_finding():
    def too_many_rows(x: Tensor) -> Tensor:
        y = torch.empty(51, device=x.device)
        _row_sum[(51,)](x, y, x.shape[1], BLOCK=32)
        return y

    sampled = execute_sampled(too_many_rows, (torch.randn(50, 21),))
    assert [finding.kind for finding in sampled.execution.findings] == [FindingKind.OUT_OF_BOUNDS]
