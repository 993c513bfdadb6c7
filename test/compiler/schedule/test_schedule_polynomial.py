"""Numbers that a launch fixes are printed as Python that means the same wherever it stands."""

from __future__ import annotations

import pytest

from kernel_agent.compiler.schedule.polynomial import Polynomial

NAMES = {"a": 7, "b": 4, "c": 3}


@pytest.mark.parametrize("text", ["a // 2", "(a + b) // (c)", "(a // 2)", "max(a, b)", "(a) - (b)", "a"])
@pytest.mark.parametrize("times", [-3, -1, 1, 2])
def test_a_product_of_a_symbol_is_the_product_of_its_value(text: str, times: int) -> None:
    # `-a // 2` and `2 * (a + b) // (c)` round elsewhere: what ends with a parenthesis need not start with it.
    number = Polynomial.symbol(text) * Polynomial.integer(times)
    assert eval(number.text(), dict(NAMES)) == times * eval(text, dict(NAMES))


def test_parentheses_are_not_doubled() -> None:
    assert (Polynomial.symbol("(a // 2)") * Polynomial.integer(2)).text() == "2 * (a // 2)"


def test_a_product_of_sums_is_divided_by_either() -> None:
    # The rows of a padded image are its pixels by its columns, sums of two sizes each: without that quotient they are
    # a rounded one, of which nothing can be proved. One term alone says nothing of the others.
    a, b, c = (Polynomial.symbol(name) for name in "abc")
    two = Polynomial.integer(2)
    for one, other in ((a + two * c, b + two * c), (a + b + c, a - b), (a - two, a - two)):
        assert (one * other).quotient(other) == one
    assert (a * a + b).quotient(a + b) is None
    assert (a * b).quotient(a + b) is None
    assert ((a + b) * (a + c) + two).quotient(a + c) is None
