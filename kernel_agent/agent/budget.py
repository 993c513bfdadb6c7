"""The limits of a run, enforced before an ask from an estimate of what it will use, never after the fact."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent.state import RunState
from kernel_agent.config import Backend, RunConfig
from kernel_agent.errors import InputError
from kernel_agent.models.prices import Price, Rates, price_of
from kernel_agent.models.protocol import Usage

FREE = Price(rates=Rates(input=0.0, cached=0.0, cache_written=0.0, output=0.0))
"""What replies cost that are replayed or written by hand."""

EXPECTED_OUTPUT = 6000
"""Output tokens assumed for an ask while no reply of the run is known: a backward with its reasoning."""


@dataclass(frozen=True)
class Budget:
    """What a run may use."""

    max_asks: int
    """Asks over the phases backward and optimize together."""
    max_tokens: int | None
    """Input and output tokens of all asks."""
    max_cost_usd: float | None
    """Dollars of all asks."""
    price: Price | None = None
    """None: the model's price is unknown; then there is no cost limit."""

    @classmethod
    def of(cls, config: RunConfig, model: str) -> Budget:
        """The budget that a configuration sets for asks of this model.

        Raises `InputError` for a cost limit that cannot be kept, as the model's price is unknown.
        """
        free = config.backend in {Backend.REPLAY, Backend.MANUAL, Backend.COMPILER}
        price = FREE if free else price_of(model)
        if price is None and config.max_cost_usd is not None:
            raise InputError(
                f"--max-cost-usd {config.max_cost_usd:g} cannot be kept to: {model} has no known price",
                remedy="limit the tokens instead (--max-tokens), or leave --max-cost-usd out",
            )
        return cls(config.max_iters, config.max_tokens, config.max_cost_usd, price)

    def refusal(self, state: RunState, estimated_input: int) -> str:
        """Why the next ask, with this many input tokens, may not be sent; empty when it may."""
        asks = len(state.rounds)
        if asks >= self.max_asks:
            return f"all {self.max_asks} asks are used (--max-iters)"
        output = expected_output(state)
        used = state.usage.input + state.usage.output
        if self.max_tokens is not None and used + estimated_input + output > self.max_tokens:
            return (
                f"the next ask needs about {estimated_input + output:,} tokens; "
                f"{used:,} of {self.max_tokens:,} are used (--max-tokens)"
            )
        if self.max_cost_usd is None or self.price is None:
            return ""
        cost = self.price.cost(Usage(input=estimated_input, output=output))
        if state.cost_usd + cost > self.max_cost_usd:
            return (
                f"the next ask costs about ${cost:.4f}; "
                f"${state.cost_usd:.4f} of ${self.max_cost_usd:g} are spent (--max-cost-usd)"
            )
        return ""


def expected_output(state: RunState) -> int:
    """Output tokens to expect of the next reply: the largest so far, or a fixed guess before the first."""
    known = [r.reply.usage.output for r in state.rounds if r.reply is not None]
    return max(known, default=0) or EXPECTED_OUTPUT
