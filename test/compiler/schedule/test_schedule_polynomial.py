"""Numbers that a launch fixes are printed as Python that means the same wherever it stands."""

from __future__ import annotations

import random

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


def random_sum(draws: random.Random) -> Polynomial:
    """Of products of up to three positive symbols, two of which are known in the present launch."""
    symbols = [Polynomial.symbol(name, positive=True, present={"a": 3, "b": 8}.get(name)) for name in "abcd"]
    found = Polynomial()
    for _ in range(draws.randint(0, 4)):
        product = Polynomial.integer(draws.randint(-4, 6))
        for symbol in draws.choices(symbols, k=draws.randint(0, 3)):
            product = product * symbol
        found = found + product
    return found


def test_what_is_said_of_a_sum_holds_of_its_values() -> None:
    # Signs of the longest products, or of all of them, decide most sums without multiplying any out: had one of these
    # short cuts it wrong, two programs would store to one element.
    draws = random.Random(0)
    said = 0
    for _ in range(400):
        number = random_sum(draws)
        for _ in range(20):
            values = {name: draws.choice((1, 2, 3, 5, 50)) for name in "abcd"}
            least = next((n for n in (60, 8, 1, 0, -3) if number.surely(n)), None)
            said += least is not None
            assert least is None or eval(number.text(), {}, values) >= least
            values |= {"a": 3, "b": 8, "c": 1 + values["c"], "d": 1 + values["d"]}
            least = next((n for n in (60, 8, 1, 0, -3) if number.likely(n)), None)
            assert least is None or eval(number.text(), {}, values) >= least
    assert said > 1000


def test_a_sum_whose_first_product_outgrows_what_is_subtracted_is_known() -> None:
    # The longest product alone tells that a sum falls, never that it rises: that is asked of what it multiplies out to.
    a, b = (Polynomial.symbol(name, positive=True) for name in "ab")
    one, two = Polynomial.integer(1), Polynomial.integer(2)
    assert (a * b - a).surely(0)
    assert (two * a * b - a - b).surely(0)
    assert not (a * b - two * a).surely(0)
    assert not (a - a * b + one).surely(0)


def test_a_symbol_is_the_same_whatever_else_is_known_of_it() -> None:
    # Two launches say different things of a size; were these two symbols, no difference of theirs would be nothing.
    known, other = Polynomial.symbol("n", positive=True, present=4), Polynomial.symbol("n", printable=False)
    assert known == other
    assert hash(known) == hash(other)
    assert (known - other).number == 0
