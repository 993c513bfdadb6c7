"""What is known of a number decides whether an address tells its indices, not what the number is called."""

from __future__ import annotations

from kernel_agent.compiler.schedule.injective import Digit, ordered
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial


def test_numbers_of_one_name_are_asked_apart_where_other_things_are_known_of_them() -> None:
    # Answers are kept for schedules that ask again, and the numbers of two launches are equal where they bear one
    # name: a stride that may be 0 must not be taken for the extent of a tile, which cannot.
    for positive in (True, False, True):
        row = Polynomial.symbol("row", positive=positive)
        found = ordered([Digit(ONE, (ONE,)), Digit(row, ())], ())
        assert found is not None
        assert found.facts() == ([] if positive else ["row >= 1"])
