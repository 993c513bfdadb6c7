"""`AnthropicModel`: Anthropic's Messages API through its SDK, with the stable prefix of a run cached at the provider.

System text and first user turn (the forward, the retrieved pairs) are the same in every ask of a run, and most of its
tokens. Both carry a cache mark, so that from the second ask on they cost a fraction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from kernel_agent.config import Backend, Effort
from kernel_agent.models.errors import CutStream, ProviderUnavailable, require_stream, said, status_error
from kernel_agent.models.hosted import CONNECT_S, HostedModel, Part
from kernel_agent.models.protocol import Conversation, Progress, Reply, Role, StopReason, Usage

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import (
        MessageParam,
        OutputConfigParam,
        RawMessageStreamEvent,
        TextBlockParam,
        ThinkingConfigParam,
    )

ANSWER_TOKENS = 16_384
"""Room for the answer beside a thinking budget."""
ADAPTIVE_TOKENS = 64_000
"""Room for thinking and answer of models that set their own budget."""
THINKING_BUDGETS = {Effort.MINIMAL: None, Effort.LOW: 4_096, Effort.MEDIUM: 10_240, Effort.HIGH: 24_576}
"""Tokens of thinking; None: no thinking."""
LEAST_BUDGET = 1_024
"""Tokens of thinking below which the API accepts no budget."""
Scale = Literal["low", "medium", "high"]
EFFORTS: dict[Effort, Scale] = {Effort.MINIMAL: "low", Effort.LOW: "low", Effort.MEDIUM: "medium", Effort.HIGH: "high"}

# Up to generation 4.5 a request sets the budget; later models set their own and take an effort.
_BUDGETED = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(-[015])?(-\d{8})?$)")
_STOPS = {
    "refusal": StopReason.REFUSAL,
    "max_tokens": StopReason.LENGTH,
    "model_context_window_exceeded": StopReason.LENGTH,
}


@dataclass(frozen=True)
class Thinking:
    """How much a model is to think, in Anthropic's terms."""

    max_tokens: int
    """Limit on thinking and answer together."""
    budget: int | None = None
    """Tokens of thinking, for models that are told."""
    effort: Scale | None = None
    """For models that set their own budget."""

    def within(self, max_output: int | None) -> Thinking:
        """The same with no more tokens than that; at least half of them are left to the answer."""
        if max_output is None or max_output >= self.max_tokens:
            return self
        budget = None if self.budget is None else min(self.budget, max_output // 2)
        return Thinking(max_output, budget if budget and budget >= LEAST_BUDGET else None, self.effort)


def thinking_of(model: str, effort: Effort) -> Thinking:
    """The table of `docs/models.md`. Models of other makers behind a compatible server are told a budget."""
    if not model.startswith("claude-") or _BUDGETED.match(model):
        budget = THINKING_BUDGETS[effort]
        return Thinking(max_tokens=ANSWER_TOKENS + (budget or 0), budget=budget)
    return Thinking(max_tokens=ADAPTIVE_TOKENS, effort=EFFORTS[effort])


class AnthropicModel(HostedModel):
    """Asks one model."""

    backend = Backend.ANTHROPIC

    def _stream(self, conversation: Conversation, on_text: Progress, max_output: int | None) -> Reply:
        with self._client() as client:
            with self._opening():
                stream = self._send(client, conversation, max_output)
            require_stream(stream.response.headers.get("content-type", ""), server=self._server)
            with self._reading():
                return read(stream, self.name, on_text)

    def _client(self) -> anthropic.Anthropic:
        import anthropic

        timeout = anthropic.Timeout(self._silence_s, connect=CONNECT_S)
        return anthropic.Anthropic(
            api_key=self._key.secret, base_url=self._url, max_retries=self._max_retries, timeout=timeout
        )

    def _send(
        self, client: anthropic.Anthropic, conversation: Conversation, max_output: int | None
    ) -> anthropic.Stream[RawMessageStreamEvent]:
        import anthropic

        thinking = thinking_of(self.name, self._effort).within(max_output)
        tells = self._sends(Part.EFFORT)
        return client.messages.create(
            model=self.name,
            max_tokens=thinking.max_tokens,
            system=[self._text(conversation.system, stable=True)],
            messages=self._messages(conversation),
            thinking=(_config(thinking) if tells else None) or anthropic.omit,
            output_config=(_output(thinking) if tells else None) or anthropic.omit,
            stream=True,
        )

    def _messages(self, conversation: Conversation) -> list[MessageParam]:
        """The turns as messages; those of one role in a row are blocks of one message."""
        messages: list[MessageParam] = []
        for role, turns in groupby(enumerate(conversation.turns), key=lambda item: item[1].role):
            content = [self._text(turn.text, stable=index == 0) for index, turn in turns]
            if role is Role.USER:
                messages.append({"role": "user", "content": content})
            else:
                messages.append({"role": "assistant", "content": content})
        return messages

    def _text(self, text: str, *, stable: bool) -> TextBlockParam:
        block: TextBlockParam = {"type": "text", "text": text}
        if stable and self._sends(Part.CACHE):
            block["cache_control"] = {"type": "ephemeral"}
        return block

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Until the first byte of the reply; the SDK has retried what can be retried."""
        import anthropic

        try:
            yield
        except anthropic.APIStatusError as error:
            message = self._key.redact(said(error.body))
            raise status_error(error.status_code, message, server=self._server, key=self._key) from error
        except anthropic.APIError as error:
            message = f"cannot reach {self._server}: {self._key.redact(error.message)}"
            raise ProviderUnavailable(message, remedy="check the network and --base-url") from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """While the reply comes in: whatever breaks here cuts it. The SDK lets transport errors through unwrapped."""
        import anthropic
        import httpx2

        try:
            yield
        except (anthropic.APIError, httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError) as error:
            message = self._key.redact(str(error))
            raise CutStream(f"{self._server} cut the reply: {message}", remedy="try again later") from error


def _config(thinking: Thinking) -> ThinkingConfigParam | None:
    if thinking.effort is not None:
        return {"type": "adaptive", "display": "summarized"}
    return None if thinking.budget is None else {"type": "enabled", "budget_tokens": thinking.budget}


def _output(thinking: Thinking) -> OutputConfigParam | None:
    return None if thinking.effort is None else {"effort": thinking.effort}


def read(stream: anthropic.Stream[RawMessageStreamEvent], model: str, on_text: Progress) -> Reply:
    """The whole reply. Raises `CutStream` when it ends without `message_stop`, and what the SDK raises."""
    text: list[str] = []
    reasoning: list[str] = []
    usage = Usage()
    stop: str | None = None
    refusal = ""
    for event in stream:
        if event.type == "message_start":
            model = event.message.model
            started = event.message.usage
            read_back, written = started.cache_read_input_tokens or 0, started.cache_creation_input_tokens or 0
            usage = Usage(input=started.input_tokens + read_back + written, cached=read_back, cache_written=written)
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            text.append(event.delta.text)
            on_text(event.delta.text)
        elif event.type == "content_block_delta" and event.delta.type == "thinking_delta":
            reasoning.append(event.delta.thinking)
        elif event.type == "message_delta":
            stop = event.delta.stop_reason or stop
            details = event.usage.output_tokens_details
            thought = details.thinking_tokens if details else 0
            usage = usage.model_copy(update={"output": event.usage.output_tokens, "reasoning": thought})
            if event.delta.stop_details is not None:
                refusal = event.delta.stop_details.explanation or ""
        elif event.type == "message_stop":
            return Reply(
                text="".join(text) or refusal,
                reasoning="".join(reasoning) or None,
                usage=usage,
                model=model,
                stop=_STOPS.get(stop or "", StopReason.COMPLETE),
            )
    raise CutStream("the reply ended before it was complete", remedy="try again later")
