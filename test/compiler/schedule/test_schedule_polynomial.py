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
