"""The checker of pairs of tile functions: what is right is green, and each planted mistake is named."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from tile_functions import rmsnorm, torch_rmsnorm
from torch import Tensor

from kernel_agent import check_tile
from kernel_agent.errors import InputError

SHAPES = "x=[4, 8], w=[8], b=[4, 8]"


@triton.jit
def scaled(x, w, b):
    return x * w[None, :] + b


def torch_scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * w + b


@triton.jit
def by_hand(x, w, b, dy):
    return dy * w[None, :], tl.sum(dy * x, axis=0), dy


@triton.jit
def wrong_sign(x, w, b, dy):
    return dy * w[None, :], -tl.sum(dy * x, axis=0), dy


@triton.jit
def without_the_sum(x, w, b, dy):
    return dy * w[None, :], dy * x, dy


@triton.jit
def wrong_in_one_element(x, w, b, dy):
    cols = tl.arange(0, x.shape[1])
    dw = tl.sum(dy * x, axis=0)
    return dy * w[None, :], tl.where(cols == 5, dw * 1.001, dw), dy


@triton.jit
def exchanged(x, w, b, dy):
    return dy, tl.sum(dy * x, axis=0), dy * w[None, :]


@triton.jit
def without_a_term(x, w, eps, dy, drstd):
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / x.shape[1] + eps)
    return dy * rstd[:, None] * w[None, :]


@triton.jit
def without_a_cotangent(x, w, eps, dy, drstd):
    n = x.shape[1]
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n + eps)
    g = dy * w[None, :]
    return g * rstd[:, None] - x * (tl.sum(g * x, axis=1) * rstd * rstd * rstd / n)[:, None]


def test_adjoint_written_by_hand_is_green() -> None:
    verdict = check_tile(scaled, by_hand, torch_scaled, shapes=SHAPES)
    assert verdict
    assert str(verdict) == "green: 4 cases agree with torch_scaled"


def test_wrong_sign_is_told_by_its_factor() -> None:
    verdict = check_tile(scaled, wrong_sign, torch_scaled, shapes=SHAPES)
    assert [problem.name for problem in verdict.problems] == ["w"]
    assert "the adjoint of `w` is wrong" in str(verdict)
    assert "it is -1 times the truth everywhere" in str(verdict)


def test_missing_broadcast_sum_is_told_by_its_extents() -> None:
    verdict = check_tile(scaled, without_the_sum, torch_scaled, shapes=SHAPES)
    assert not verdict
    assert "the adjoint of `w` is [4, 8], but `w` is [8]: it must be summed" in str(verdict)


def test_one_wrong_element_is_named() -> None:
    # a thousandth at one element of eight: a comparison of norms over everything might let it through
    (problem,) = check_tile(scaled, wrong_in_one_element, torch_scaled, shapes=SHAPES).problems
    assert problem.name == "w"
    assert "worst at [5]" in problem.message


def test_exchanged_adjoints_are_both_named() -> None:
    # both have the extents of the other, so values alone tell
    verdict = check_tile(scaled, exchanged, torch_scaled, shapes=SHAPES)
    assert {problem.name for problem in verdict.problems} == {"x", "b"}


def test_dropped_term_is_found() -> None:
    # the derivative through the statistics is missing: of the right size, and right for a constant row alone
    verdict = check_tile(
        rmsnorm, without_a_term, torch_rmsnorm, shapes="x=[4, 8], w=[8], eps=fp32", wrt="x", seeds=(0,)
    )
    assert [problem.name for problem in verdict.problems] == ["x"]


def test_ignored_cotangent_is_found_by_giving_it_alone() -> None:
    # right wherever the second cotangent is zero: only cases in which it is not can tell
    shapes = "x=[4, 8], w=[8], eps=fp32"
    verdict = check_tile(rmsnorm, without_a_cotangent, torch_rmsnorm, shapes=shapes, wrt="x", seeds=(0,))
    assert [problem.name for problem in verdict.problems] == ["x"]


def test_forward_that_is_not_the_torch_function_is_told_as_its_result() -> None:
    verdict = check_tile(scaled, by_hand, lambda x, w, b: x * w - b, shapes=SHAPES, wrt=("x", "w", "b"))
    assert "the result `out` is wrong" in str(verdict)
    assert verdict.problems[0].name == "out"


def test_without_a_torch_function_the_executor_is_the_truth() -> None:
    # its autograd runs through the IR of the function and knows nothing of the adjoint
    assert "agree with the executor's derivative" in str(check_tile(scaled, by_hand, shapes=SHAPES))
    assert not check_tile(scaled, wrong_sign, shapes=SHAPES)


@triton.jit
def logarithm(x):
    return tl.log(x)


@triton.jit
def reciprocal(x, dy):
    return dy / x


@triton.jit
def half_right(x, dy):
    return tl.where(x > 1.0, dy / x, dy)


def test_inputs_are_positive_where_the_truth_needs_that() -> None:
    # NaN on both sides would be equal: a wrong adjoint of a logarithm must not pass by that
    assert check_tile(logarithm, reciprocal, torch.log, shapes="x=[16]")
    assert not check_tile(logarithm, half_right, torch.log, shapes="x=[16]")


def test_inputs_may_be_said() -> None:
    above = {"x": lambda x: 1.5 + x.abs()}
    assert check_tile(logarithm, half_right, torch.log, shapes="x=[16]", inputs=above)


def test_several_shapes_are_all_looked_at() -> None:
    # right at one width: a constant of the shape stands in the text
    assert check_tile(mean, mean_of_eight, lambda x: x.mean(0), shapes="x=[8]")
    verdict = check_tile(mean, mean_of_eight, lambda x: x.mean(0), shapes=["x=[8]", "x=[16]"])
    assert "x=[16]" in verdict.problems[0].case


@triton.jit
def mean(x):
    return tl.sum(x, axis=0) / x.shape[0]


@triton.jit
def mean_of_eight(x, dy):
    return tl.zeros(x.shape, tl.float32) + dy / 8


@pytest.mark.parametrize(
    ("adjoint", "options", "message"),
    [
        (reciprocal, {}, "takes 2 arguments instead of 4"),
        (by_hand, {"wrt": "x"}, "returns 3 adjoints instead of 1"),
        (by_hand, {"inputs": {"x": lambda x: x * torch.nan}}, "no finite value"),
        (by_hand, {"torch_fn": lambda x, w, b: w}, r"returns \[\[8\]\]"),
    ],
)
def test_what_does_not_fit_is_said(adjoint, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_tile(scaled, adjoint, **{"torch_fn": torch_scaled, "shapes": SHAPES, **options})
    assert caught.value.remedy
