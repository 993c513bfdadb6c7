"""The price list is dated data, and what is not in it costs `None`, never zero."""

from __future__ import annotations

import datetime

import pytest

from kernel_agent.models import Usage, cost_of, estimate_tokens, price_of
from kernel_agent.models.defaults import DEFAULT_MODELS
from kernel_agent.models.prices import price_list


def test_the_list_says_when_and_where_it_was_read() -> None:
    prices = price_list()
    assert datetime.date.fromisoformat(prices.date) >= datetime.date(2026, 11, 21)
    assert prices.source
    assert prices.unit.startswith("US dollars per million tokens")


@pytest.mark.parametrize("model", DEFAULT_MODELS.values())
def test_default_models_have_a_price(model: str) -> None:
    # Else --max-cost-usd would be void in the most common case.
    assert price_of(model) is not None


@pytest.mark.parametrize("model", sorted(price_list().models))
def test_rates_are_plausible(model: str) -> None:
    price = price_list().models[model]
    for rates in filter(None, (price.rates, price.long_rates)):
        assert 0 < rates.cached <= rates.input <= rates.cache_written <= 2 * rates.input
        assert rates.input < rates.output <= 10 * rates.input
    assert (price.long_from is None) == (price.long_rates is None)


@pytest.mark.parametrize("model", ["gpt-5-2025-08-07", "claude-haiku-4-5-20251001"])
def test_a_dated_release_costs_what_its_name_costs(model: str) -> None:
    assert price_of(model) is not None


def test_an_unknown_model_has_no_price() -> None:
    assert price_of("gpt-5-turbo-imaginary") is None
    assert cost_of("gpt-5-turbo-imaginary", Usage(input=10)) is None


def test_a_long_prompt_costs_the_long_rates_throughout() -> None:
    short, long = Usage(input=272_000, output=1_000_000), Usage(input=272_001, output=1_000_000)
    assert cost_of("gpt-6-sol", short) == pytest.approx(0.272 * 2 + 10)
    assert cost_of("gpt-6-sol", long) == pytest.approx(0.272001 * 4 + 15)


# Counted with the tokenizer that Anthropic published in 2023.
COUNTED = {
    "tl.store(dx_ptr + row * stride + cols, dx, mask=cols < N)": 22,
    "The gradient of the loss with respect to the input.": 11,
}


@pytest.mark.parametrize("text", COUNTED)
def test_an_estimate_lies_near_the_count(text: str) -> None:
    assert estimate_tokens(text) == pytest.approx(COUNTED[text], rel=0.25)


def test_no_text_has_no_tokens_and_more_text_has_more() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens("漢字") >= 2
    assert estimate_tokens("a b\n" * 100) > estimate_tokens("a b\n" * 50)
