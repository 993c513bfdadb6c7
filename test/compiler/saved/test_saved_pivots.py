"""Moments about a number of the row have the derivatives of those about its mean, where they are known to be that."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from saved_checks import Forward, close, empty, kernel_from, ran, same_gradients, seeded, tensor

from kernel_agent.compiler.saved.pivots import use_pivots
from kernel_agent.compiler.ssa.code import Code

ROWS, N = 3, 37


@triton.jit
def moments_about(x_ptr, y_ptr, rows, n, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    m = tl.arange(0, BLOCK_M)
    at = x_ptr + m[:, None] * n
    here = (m < rows)[:, None]
    pivot = tl.load(x_ptr + m * n, mask=m < BLOCK_M if KIND == "every pivot" else m < rows, other=0.0)[:, None]
    first = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for start in range(0, n, BLOCK):
        cols = (start + tl.arange(0, BLOCK))[None, :]
        there = here & (cols < (n - 1 if KIND == "fewer" else n))
        x = tl.load(at + cols, mask=here & (cols < n), other=0.0)
        d = tl.where(there, x - pivot, 0.0)
        first += d
        second += d * d
    shift = tl.sum(first, 1) / n
    variance = tl.maximum(tl.sum(second, 1) / n - shift * shift, 0.0)
    mean = pivot + shift[:, None]
    all_rows = m < BLOCK_M if KIND == "every pivot" else m < rows
    tl.store(y_ptr + m, variance, mask=all_rows)
    tl.store((y_ptr + BLOCK_M + m)[:, None], mean * mean, mask=all_rows[:, None])


@triton.jit
def moments_about_a_head(x_ptr, y_ptr, n, BLOCK: tl.constexpr, KIND: tl.constexpr):
    at = x_ptr + tl.program_id(0) * n
    cols = tl.arange(0, BLOCK)
    head = tl.load(at + cols, mask=cols < n, other=0.0)
    pivot = tl.sum(head, 0) / BLOCK
    first = tl.where(cols < n, (head * head if KIND == "another head" else head) - pivot, 0.0)
    second = first * first
    for start in range(BLOCK, n, BLOCK):
        x = tl.load(at + start + cols, mask=start + cols < n, other=0.0)
        d = tl.where(start + cols < n, x - pivot, 0.0)
        first += d
        second += d * d
    shift = tl.sum(first, 0) / n
    mean = pivot + shift
    variance = tl.sum(second, 0) / n - shift * shift
    tl.store(y_ptr + tl.program_id(0), variance + mean * mean * mean)


def about_the_first(kind: str = "") -> Forward:
    """Of a tile with more rows than there are, but for one kind: there the last has a pivot, and nothing about it."""
    given = {"x_ptr": 2 + seeded(ROWS + 1, N), "y_ptr": torch.zeros(8, dtype=torch.float64), "rows": ROWS, "n": N}
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "rows": "i32", "n": "i32"}
    kernel = kernel_from(moments_about, types, BLOCK_M=4, BLOCK=16, KIND=kind)
    return ran(kernel, (1,), given, ["x_ptr"], ["y_ptr"])


def about_a_head(kind: str = "") -> Forward:
    given = {"x_ptr": 2 + seeded(ROWS, N), "y_ptr": empty(ROWS), "n": N}
    kernel = kernel_from(moments_about_a_head, {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}, BLOCK=16, KIND=kind)
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


@pytest.mark.parametrize("forward", [about_the_first(), about_a_head()], ids=["first element", "first tile"])
def test_what_moments_are_computed_about_has_no_derivative(forward: Forward) -> None:
    saved = use_pivots(forward.kernel)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    # The pivot's own addition, or that of the tile it is the mean of, is gone: each element is added to in loops alone.
    assert all(op.code is not Code.ATOMIC_ADD for op in backward.kernel.body.ops)
    assert any(op.code is Code.ATOMIC_ADD for op in plain.kernel.body.ops)


def test_moments_about_the_first_element_are_mean_and_variance() -> None:
    # Both adjoints could share a mistake in what the loop is taken to compute.
    forward = about_the_first()
    x = tensor(forward.arguments["x_ptr"])[:ROWS]
    close(tensor(forward.arguments["y_ptr"])[:ROWS], x.var(1, correction=0), "variance")
    close(tensor(forward.arguments["y_ptr"])[4 : 4 + ROWS], x.mean(1) ** 2, "squared mean")


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(about_the_first("fewer"), id="n counts a number that is not added"),
        pytest.param(about_the_first("every pivot"), id="a row without numbers ends in its pivot"),
        pytest.param(about_a_head("another head"), id="the first tile adds something else"),
    ],
)
def test_sums_that_depend_on_the_pivot_keep_its_derivative(forward: Forward) -> None:
    saved = use_pivots(forward.kernel)
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))
    assert not any("derivative of a mean" in remark for remark in saved.remarks)
