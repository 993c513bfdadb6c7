"""Median, spread, and which candidate is kept for its speed."""

from __future__ import annotations

import math

import pytest

from kernel_agent.bench.records import Basis, Measurement, ShapeTime, decide
from kernel_agent.bench.statistics import timing_of


def measurement(*medians: float, basis: Basis = Basis.MEASURED, device: str = "NVIDIA H200") -> Measurement:
    shapes = tuple(ShapeTime(label=f"n={place}", median_us=us) for place, us in enumerate(medians))
    return Measurement(basis=basis, device=device, shapes=shapes)


def test_one_slow_repetition_moves_neither_median_nor_spread():
    calm = timing_of([10.0] * 20 + [900.0])
    assert calm.median_us == 10.0
    assert calm.spread == 0.0
    assert calm.repeats == 21


def test_spread_is_the_interquartile_range_over_the_median():
    assert timing_of([8.0, 9.0, 10.0, 11.0, 12.0]).spread == pytest.approx(0.2)


@pytest.mark.parametrize("times", [[], [0.0, 1.0], [-1.0], [math.nan], [math.inf, 1.0]])
def test_what_is_no_time_is_refused(times: list[float]):
    # a child that reports nothing, zero, or NaN must not become a speed
    with pytest.raises(ValueError, match="no times"):
        timing_of(times)


def test_faster_everywhere_is_kept():
    decision = decide(measurement(10, 20), measurement(9, 18), 0.02)
    assert decision.kept
    assert decision.gain == pytest.approx(0.1)


def test_a_gain_below_the_asked_one_is_rolled_back():
    assert not decide(measurement(10, 20), measurement(9.9, 19.8), 0.02).kept


def test_one_shape_that_becomes_slower_is_enough_to_roll_back():
    # the geometric mean alone would keep this
    decision = decide(measurement(10, 20), measurement(10.6, 10), 0.02)
    assert not decision.kept
    assert decision.worst == pytest.approx(0.06)
    assert "n=0" in decision.line


def test_equal_times_are_not_kept_even_when_nothing_is_asked_for():
    assert not decide(measurement(10), measurement(10), 0.0).kept


def test_modelled_and_measured_times_are_never_compared():
    with pytest.raises(ValueError, match="cannot be compared"):
        decide(measurement(10), measurement(5, basis=Basis.MODELLED), 0.02)
    with pytest.raises(ValueError, match="cannot be compared"):
        decide(measurement(10), measurement(5, device="NVIDIA H100"), 0.02)
