"""What a reply costs, from one dated data file. A model that is not in it has no price, never a guessed one."""

from __future__ import annotations

import functools
import re
from importlib.resources import files

from pydantic import Field

from kernel_agent.models.protocol import Usage
from kernel_agent.record import Record

_MILLION = 1_000_000
_DATED = re.compile(r"-(\d{8}|\d{4}-\d{2}-\d{2})$")


class Rates(Record):
    """US dollars per million tokens."""

    input: float
    cached: float = Field(description="input read from the provider's cache")
    cache_written: float = Field(description="input stored in the provider's cache")
    output: float = Field(description="reasoning included")


class Price(Record):
    """What one model costs."""

    rates: Rates
    long_from: int | None = Field(
        default=None, description="input tokens above which the whole reply costs `long_rates`"
    )
    long_rates: Rates | None = None

    def cost(self, usage: Usage) -> float:
        """US dollars for one reply."""
        rates = self.rates
        if self.long_rates is not None and self.long_from is not None and usage.input > self.long_from:
            rates = self.long_rates
        plain = usage.input - usage.cached - usage.cache_written
        parts = (
            plain * rates.input,
            usage.cached * rates.cached,
            usage.cache_written * rates.cache_written,
            usage.output * rates.output,
        )
        return sum(parts) / _MILLION


class PriceList(Record):
    """The data file."""

    date: str = Field(description="day on which the prices were read, ISO 8601")
    source: str = Field(description="where they were read")
    unit: str
    models: dict[str, Price]


@functools.cache
def price_list() -> PriceList:
    """The shipped prices."""
    return PriceList.model_validate_json(
        files("kernel_agent.models").joinpath("prices.json").read_text(encoding="utf-8")
    )


def price_of(model: str) -> Price | None:
    """The price of a model. A dated release, as servers report it (`gpt-5-2025-08-07`), costs what its name costs."""
    models = price_list().models
    return models.get(model) or models.get(_DATED.sub("", model))


def cost_of(model: str, usage: Usage) -> float | None:
    """US dollars for one reply of a model, or None when its price is unknown."""
    price = price_of(model)
    return None if price is None else price.cost(usage)
