"""The exact tier's rule, on tensors: what passes, what does not, and that no scale is built in."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.gate.rule import Agreement, compare, tile_extent


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_rounding_of_float64_passes():
    truth = normal(40, 70)
    assert compare(truth * (1 + 1e-14), truth, 1.0).passed


@pytest.mark.parametrize("shape", [(), (1,), (200,), (17, 65), (2, 3, 17, 65)])
def test_one_wrong_element_fails_in_any_shape(shape):
    # A norm over the whole tensor would let this through at 1e-3 of one element in millions.
    truth = normal(*shape)
    answer = truth.clone()
    answer.flatten()[-1] *= 1.01
    seen = compare(answer, truth, 1.0)
    assert not seen.passed
    assert seen.tile == tuple((n - 1) // e for n, e in zip(shape, tile_extent(shape), strict=True)), (
        "the last tile is named"
    )
    assert seen.wrong_tiles == 1


def test_small_values_are_not_hidden_by_a_large_neighbour():
    # Per tile, not per tensor: the second row of tiles is a million times smaller and wrong by half.
    truth = normal(32, 64)
    truth[16:] *= 1e-6
    answer = truth.clone()
    answer[16:] *= 1.5
    assert not compare(answer, truth, 0.0).passed


def test_the_verdict_does_not_depend_on_the_scale_of_the_cotangent():
    # An absolute tolerance fails this at one end or at the other.
    truth, error = normal(20, 20), 3e-5 * normal(20, 20)
    for factor in (1e-30, 1.0, 1e30):
        seen = compare(factor * (truth + error), factor * truth, factor)
        assert not seen.passed
        assert seen.ratio == pytest.approx(compare(truth + error, truth, 1.0).ratio)


def test_a_gradient_that_cancels_to_zero_may_keep_rounding():
    # Softmax under a constant cotangent: the truth is zero, an honest answer some ulps of a typical gradient.
    truth = torch.zeros(20, 20, dtype=torch.float64)
    assert compare(1e-16 * normal(20, 20), truth, 1.0).passed
    assert not compare(1e-7 * normal(20, 20), truth, 1.0).passed


def test_a_zero_cotangent_wants_exact_zeros():
    truth = torch.zeros(5, dtype=torch.float64)
    assert compare(truth, truth, 0.0).passed
    assert not compare(truth + 1e-300, truth, 0.0).passed


def test_nan_and_infinities_must_agree_in_place_and_sign():
    truth = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")], dtype=torch.float64)
    assert compare(truth.clone(), truth, 1.0).passed
    flipped = truth.clone()
    flipped[2] = -float("inf")
    assert not compare(flipped, truth, 1.0).passed


def test_nan_in_the_answer_alone_is_not_finite_and_in_the_truth_alone_is_different():
    finite = normal(4)
    broken = finite.clone()
    broken[1] = float("nan")
    assert compare(broken, finite, 1.0).agreement is Agreement.NOT_FINITE
    assert compare(finite, broken, 1.0).agreement is Agreement.DIFFERENT


@pytest.mark.parametrize("factor", [-1.0, 2.0, 0.125])
def test_a_common_factor_is_recognised(factor):
    truth = normal(30, 30)
    seen = compare(factor * truth, truth, 1.0)
    assert seen.is_multiple
    assert seen.factor == pytest.approx(factor)


def test_an_error_that_is_no_factor_is_not_called_one():
    truth = normal(30, 30)
    assert not compare(truth + normal(30, 30).roll(1), truth, 1.0).is_multiple


def test_empty_tensors_agree():
    empty = torch.empty(0, 4, dtype=torch.float64)
    assert compare(empty, empty, 1.0).passed
