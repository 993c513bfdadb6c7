"""OpenAI's Responses protocol: one request out, one stream of events in."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kernel_agent.config import Effort
from kernel_agent.models.errors import CutStream, RefusedReply, RequestRejected, is_policy
from kernel_agent.models.protocol import Conversation, Progress, Reply, StopReason, Usage

if TYPE_CHECKING:
    import openai
    from openai.types.responses import EasyInputMessageParam, Response, ResponseInputParam, ResponseStreamEvent
    from openai.types.shared_params import Reasoning

_TRANSIENT = {"server_error", "rate_limit_exceeded"}


def send(
    client: openai.OpenAI,
    model: str,
    conversation: Conversation,
    effort: Effort | None,
    *,
    summary: bool,
    cache: bool,
    max_output: int | None = None,
) -> openai.Stream[ResponseStreamEvent]:
    """Start a reply. Nothing is stored at the provider; the prompt cache is keyed by a hash of the stable prefix."""
    import openai

    reasoning: Reasoning = {"effort": effort.value} if effort else {}
    if effort and summary:
        reasoning["summary"] = "auto"
    prefix = hashlib.sha256((conversation.system + conversation.turns[0].text).encode()).hexdigest()[:32]
    return client.responses.create(
        model=model,
        instructions=conversation.system,
        input=_input(conversation),
        reasoning=reasoning or openai.omit,
        prompt_cache_key=prefix if cache else openai.omit,
        max_output_tokens=openai.omit if max_output is None else max_output,
        store=False,
        stream=True,
    )


def _input(conversation: Conversation) -> ResponseInputParam:
    messages: ResponseInputParam = []
    for turn in conversation.turns:
        message: EasyInputMessageParam = {"role": turn.role.value, "content": turn.text}
        messages.append(message)
    return messages


def read(stream: openai.Stream[ResponseStreamEvent], on_text: Progress) -> Reply:
    """The whole reply. Raises `CutStream`, `RefusedReply` and `RequestRejected`, and what the SDK raises."""
    for event in stream:
        if event.type == "response.output_text.delta" or event.type == "response.refusal.delta":
            on_text(event.delta)
        elif event.type == "response.completed" or event.type == "response.incomplete":
            return _reply(event.response)
        elif event.type == "response.failed":
            raise _failure(event.response)
        elif event.type == "error":
            raise CutStream(f"the reply broke off: {event.message}", remedy="try again later")
    raise CutStream("the reply ended before it was complete", remedy="try again later")


def _reply(response: Response) -> Reply:
    text: list[str] = []
    refused: list[str] = []
    reasoning: list[str] = []
    for item in response.output:
        if item.type == "reasoning":
            reasoning += [part.text for part in item.summary]
        elif item.type == "message":
            text += [part.text for part in item.content if part.type == "output_text"]
            refused += [part.refusal for part in item.content if part.type == "refusal"]
    return Reply(
        text="".join(text or refused),
        reasoning="\n\n".join(reasoning) or None,
        usage=_usage(response),
        model=response.model,
        stop=_stop(response, refused=bool(refused)),
    )


def _stop(response: Response, *, refused: bool) -> StopReason:
    reason = response.incomplete_details.reason if response.incomplete_details else None
    if refused or reason == "content_filter":
        return StopReason.REFUSAL
    return StopReason.LENGTH if response.status == "incomplete" else StopReason.COMPLETE


def _usage(response: Response) -> Usage:
    used = response.usage
    if used is None:
        return Usage()
    return Usage(
        input=used.input_tokens,
        cached=used.input_tokens_details.cached_tokens,
        output=used.output_tokens,
        reasoning=used.output_tokens_details.reasoning_tokens,
        # Absent from the answers of models that predate priced cache writes.
        cache_written=getattr(used.input_tokens_details, "cache_write_tokens", None) or 0,
    )


def _failure(response: Response) -> CutStream | RefusedReply | RequestRejected:
    code = response.error.code if response.error else "server_error"
    message = response.error.message if response.error else "no reason given"
    if code in _TRANSIENT:
        return CutStream(f"the reply failed: {message}", remedy="try again later")
    if is_policy(code):
        return RefusedReply(f"the request was refused: {message}", remedy="ask another model with --model")
    return RequestRejected(f"the reply failed ({code}): {message}", status=400, remedy="check --model")
