"""What honest rounding does to results: estimated without a GPU from faithful and exact arithmetic."""

from __future__ import annotations

import pytest
import torch
from forwards import SCALED

from kernel_agent.ir import import_module
from kernel_agent.oracle import (
    Point,
    TruthError,
    Truths,
    describe,
    rounding_at,
    rounding_error,
    rounding_of_gradients,
    rounding_of_outputs,
)
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.userfile import read_file


def pair(judge, name):
    return import_module(judge.spec(name).facts.path, f"rounding_{name}")


@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float32, 2.0**-23), (torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)]
)
def test_a_kernel_that_computes_in_float32_errs_by_one_rounding_of_its_storage_type(judge, dtype, eps):
    module = pair(judge, "softmax")
    x = torch.randn(8, 100).to(dtype)
    (error,) = rounding_of_outputs(lambda x: module.forward(x)[0], (x,))
    assert error.dtype == str(dtype).removeprefix("torch.")
    # half an ulp at most where nothing but the store rounds, 0.29 of one on average; exp and the sum add in float32
    assert 0.05 * eps < error.rms < (2 * eps if dtype == torch.float32 else 0.5 * eps), str(error)
    assert error.overflowed == 0


def test_gradients_are_named_and_their_errors_are_those_of_float32(judge):
    module = pair(judge, "layernorm")
    x, weight, bias = torch.randn(16, 200), torch.randn(200), torch.randn(200)
    errors = rounding_of_gradients(
        module.forward, module.backward, (x, weight, bias), (torch.randn(16, 200),), ("x", "weight", "bias")
    )
    assert [error.name for error in errors] == ["x", "weight", "bias"]
    for error in errors:
        assert 1e-8 < error.rms < 1e-6, f"{error}: float32 all the way"


def test_the_estimate_for_a_wrong_backward_is_no_larger_than_for_a_right_one(judge):
    # It speaks of rounding alone: both executions share every mistake, so a mistake cannot hide in the estimate.
    module = pair(judge, "layernorm")
    wrong = lambda saved, g: tuple(3 * d for d in module.backward(saved, g))  # noqa: E731
    args, names = (torch.randn(16, 200), torch.randn(200), torch.randn(200)), ("x", "weight", "bias")
    cotangent = (torch.randn(16, 200),)
    right_errors = rounding_of_gradients(module.forward, module.backward, args, cotangent, names)
    for right, error in zip(
        right_errors, rounding_of_gradients(module.forward, wrong, args, cotangent, names), strict=True
    ):
        assert error.rms == pytest.approx(right.rms, rel=0.5), right.name


def test_the_record_counts_errors_in_units_of_the_stored_type():
    exact = torch.ones(100, dtype=torch.float64)
    measured = exact.clone()
    measured[0] = 1 + 2.0**-10
    error = rounding_error("dx", measured, exact, torch.float16)
    assert error.largest_ulps == 1.0
    assert error.rms_ulps == pytest.approx(0.1)
    assert error.rms == pytest.approx(0.1 * 2.0**-10)


def test_elements_that_overflow_are_counted_and_do_not_hide_the_others():
    exact = torch.full((10,), 2.0, dtype=torch.float64)
    measured = exact * (1 + 2.0**-11)
    measured[3] = torch.inf
    error = rounding_error("dx", measured, exact, torch.float16)
    assert (error.overflowed, error.elements) == (1, 10)
    assert error.rms == pytest.approx(2.0**-11)
    assert "1 of 10 elements overflow" in str(error)


def test_zero_gradients_have_no_error_and_no_division_by_zero():
    error = rounding_error("dx", torch.zeros(4), torch.zeros(4), torch.float32)
    assert (error.rms, error.largest, error.rms_ulps) == (0.0, 0.0, 0.0)


def test_a_spec_is_estimated_in_a_truth_child(tmp_path, sandbox):
    path = tmp_path / "user.py"
    path.write_text(SCALED)
    truths = Truths(describe(read_file(path), sandbox), sandbox)
    (error,) = rounding_at(truths, Point(entry=ShapeEntry(dims={"n": 1000})))
    assert error.elements == 1000
    assert 0.1 * 2.0**-23 < error.rms < 2.0**-24, "one product, rounded once"
    with pytest.raises(TruthError, match="no rounding error at n=-1"):
        rounding_at(truths, Point(entry=ShapeEntry(dims={"n": -1})))
