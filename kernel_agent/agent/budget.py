"""The limits of a run, enforced before an ask from an estimate of what it will use, never after the fact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.agent.state import Round, RunState
from kernel_agent.config import Backend, RunConfig
from kernel_agent.errors import InputError
from kernel_agent.models.prices import Price, Rates, price_of
from kernel_agent.models.protocol import Usage
from kernel_agent.models.tokens import estimate_tokens

FREE = Price(rates=Rates(input=0.0, cached=0.0, cache_written=0.0, output=0.0))
"""What replies cost that are replayed or written by hand."""

LEAST_OUTPUT = 16
"""Below this providers accept no limit; an ask that has less left is not sent."""

_MANY = 1_000_000
"""Tokens that prices are stated for."""

EXPECTED_OUTPUT = 6000
"""Output tokens assumed for an ask while no reply of the run is known: a backward with its reasoning."""


@dataclass(frozen=True)
class Fitting:
    """How many of some asks fit into a budget."""

    count: int
    refusal: str = ""
    """Why not more; empty when all fit."""


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

    def refusal(self, state: RunState, estimated_input: int, *, free: bool = False) -> str:
        """Why the next ask, with this many input tokens, may not be sent; empty when it may.

        Asks that were sent and not answered yet count with what they are expected to use. A `free` ask does not count
        as an ask, but its tokens and dollars do.
        """
        return self.fitting(state, (estimated_input,), free=free).refusal

    def fitting(self, state: RunState, estimated_inputs: Sequence[int], *, free: bool = False) -> Fitting:
        """How many asks with these input tokens fit, if they are sent at once and in this order."""
        output = expected_output(state)
        pending = [r.estimated_input for r in state.rounds if r.reply is None]
        for count, estimate in enumerate(estimated_inputs):
            sent = [*pending, *estimated_inputs[:count]]
            refusal = self._refusal(state, 0 if free else state.asks + count, sent, estimate, output)
            if refusal:
                return Fitting(count, refusal)
        return Fitting(len(estimated_inputs))

    def output_limit(self, state: RunState, estimated_input: int) -> int | None:
        """Tokens that the reply to an ask may have, so that the limits hold within it, too; None without limits.

        Asks that wait for their replies at the same time share what is left equally.
        """
        pending = [r.estimated_input for r in state.rounds if r.reply is None]
        limits: list[float] = []
        if self.max_tokens is not None:
            limits.append((self.max_tokens - sum(map(used_tokens, state.rounds)) - sum(pending)) / len(pending))
        if self.max_cost_usd is not None and self.price is not None:
            left = self.max_cost_usd - state.cost_usd - sum(self.price.cost(Usage(input=size)) for size in pending)
            each = self.price.cost(Usage(input=estimated_input, output=_MANY)) - self.price.cost(
                Usage(input=estimated_input)
            )
            limits += [left / len(pending) / each * _MANY] if each else []
        return max(LEAST_OUTPUT, int(min(limits))) if limits else None

    def _refusal(self, state: RunState, asks: int, sent: Sequence[int], estimate: int, output: int) -> str:
        """`sent`: estimated input tokens of the asks whose replies are not known yet."""
        if asks >= self.max_asks:
            return f"all {self.max_asks} asks are used (--max-iters)"
        used = sum(map(used_tokens, state.rounds)) + sum(sent) + output * len(sent)
        if self.max_tokens is not None and used + estimate + output > self.max_tokens:
            return (
                f"the next ask needs about {estimate + output:,} tokens; "
                f"{used:,} of {self.max_tokens:,} are used (--max-tokens)"
            )
        if self.max_cost_usd is None or self.price is None:
            return ""
        price = self.price
        spent = state.cost_usd + sum(price.cost(Usage(input=size, output=output)) for size in sent)
        cost = price.cost(Usage(input=estimate, output=output))
        if spent + cost > self.max_cost_usd:
            return (
                f"the next ask costs about ${cost:.4f}; "
                f"${spent:.4f} of ${self.max_cost_usd:g} are spent (--max-cost-usd)"
            )
        return ""


def expected_output(state: RunState) -> int:
    """Output tokens to expect of the next reply: the largest so far, or a fixed guess before the first."""
    known = [r.reply.usage.output for r in state.rounds if r.reply is not None]
    return max(known, default=0) or EXPECTED_OUTPUT


def used_tokens(asked: Round) -> int:
    """Tokens that an answered ask has used; estimated where nobody counts them, as of replies written by hand."""
    if asked.reply is None:
        return 0
    usage = asked.reply.usage
    return usage.input + usage.output or asked.estimated_input + estimate_tokens(asked.reply.text)
