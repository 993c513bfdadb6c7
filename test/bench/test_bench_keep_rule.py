"""What is kept for its speed, and what is not."""

import pytest

from kernel_agent.bench.records import Basis, Measurement, ShapeTime, decide


def took(*times: float, spread: float = 0.0, basis: Basis = Basis.MEASURED, device: str = "a GPU") -> Measurement:
    shapes = tuple(ShapeTime(label=f"N={n}", median_us=time, spread=spread) for n, time in enumerate(times))
    return Measurement(basis=basis, device=device, shapes=shapes)


def test_a_faster_backward_is_kept() -> None:
    found = decide(took(100.0, 10.0), took(90.0, 9.0), 0.02)
    assert found.kept
    assert found.gain == pytest.approx(0.1)


def test_less_gain_than_is_asked_for_is_not_kept() -> None:
    assert not decide(took(100.0), took(99.0), 0.02).kept


def test_one_shape_that_is_much_slower_outweighs_the_mean() -> None:
    # The geometric mean alone would keep it: half the time at two shapes, 10 % more at the third.
    found = decide(took(100.0, 100.0, 100.0), took(50.0, 50.0, 110.0), 0.02)
    assert not found.kept
    assert "10% slower at N=2" in found.line


def test_a_difference_within_the_spread_is_none() -> None:
    # The same kernel timed twice differs by some percent where it takes microseconds.
    found = decide(took(200.0, 5.0, spread=0.1), took(199.0, 4.6, spread=0.1), 0.02)
    assert not found.kept
    assert found.gain == 0.0


def test_a_shape_slower_within_the_spread_does_not_forbid_a_gain_elsewhere() -> None:
    assert decide(took(200.0, 5.0, spread=0.08), took(100.0, 5.3, spread=0.08), 0.02).kept


def test_times_of_two_devices_are_not_compared() -> None:
    with pytest.raises(ValueError, match="another device"):
        decide(took(1.0), took(0.5, device="another GPU"), 0.02)


def test_modelled_and_measured_times_are_not_compared() -> None:
    with pytest.raises(ValueError, match="basis"):
        decide(took(1.0), took(0.5, basis=Basis.MODELLED), 0.02)
