"""OpenAI's chat completions, the protocol that vLLM, Ollama, llama.cpp and most gateways speak."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from kernel_agent.config import Effort
from kernel_agent.models.errors import CutStream
from kernel_agent.models.protocol import Conversation, Progress, Reply, Role, StopReason, Usage

if TYPE_CHECKING:
    import openai
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
    from openai.types.chat.chat_completion_chunk import ChoiceDelta

_STOPS = {"length": StopReason.LENGTH, "content_filter": StopReason.REFUSAL}


def send(
    client: openai.OpenAI,
    model: str,
    conversation: Conversation,
    effort: Effort | None,
    *,
    usage: bool,
    max_output: int | None = None,
    old_limit: bool = True,
) -> openai.Stream[ChatCompletionChunk]:
    """Start a reply. The limit goes by its older name, which every server knows, unless that was refused."""
    import openai

    limit = openai.omit if max_output is None else max_output
    return client.chat.completions.create(
        model=model,
        messages=_messages(conversation),
        reasoning_effort=effort.value if effort else openai.omit,
        stream_options={"include_usage": True} if usage else openai.omit,
        max_tokens=limit if old_limit else openai.omit,
        max_completion_tokens=openai.omit if old_limit else limit,
        stream=True,
    )


def _messages(conversation: Conversation) -> list[ChatCompletionMessageParam]:
    """The turns as messages; those of one role in a row are one message, as some servers insist on taking turns."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": conversation.system}]
    for role, turns in groupby(conversation.turns, key=lambda turn: turn.role):
        text = "\n".join(turn.text for turn in turns)
        if role is Role.USER:
            messages.append({"role": "user", "content": text})
        else:
            messages.append({"role": "assistant", "content": text})
    return messages


def read(stream: openai.Stream[ChatCompletionChunk], model: str, on_text: Progress) -> Reply:
    """The whole reply. Raises `CutStream` when it ends without a finish reason, and what the SDK raises."""
    text: list[str] = []
    refused: list[str] = []
    reasoning: list[str] = []
    finish: str | None = None
    usage = Usage()
    for chunk in stream:
        model = chunk.model or model
        if chunk.usage is not None:
            usage = _usage(chunk.usage)
        for choice in chunk.choices:
            said = choice.delta.content or choice.delta.refusal or ""
            (refused if choice.delta.refusal else text).append(said)
            reasoning.append(_thought(choice.delta))
            finish = choice.finish_reason or finish
            if said:
                on_text(said)
    if finish is None:
        raise CutStream("the reply ended before it was complete", remedy="try again later")
    return Reply(
        text="".join(text) or "".join(refused),
        reasoning="".join(reasoning) or None,
        usage=usage,
        model=model,
        stop=StopReason.REFUSAL if any(refused) else _STOPS.get(finish, StopReason.COMPLETE),
    )


def _thought(delta: ChoiceDelta) -> str:
    """Reasoning text, which the protocol has no field for: `reasoning_content` of vLLM, `reasoning` of Ollama."""
    extra = delta.model_extra or {}
    thought = extra.get("reasoning_content") or extra.get("reasoning")
    return thought if isinstance(thought, str) else ""


def _usage(used: CompletionUsage) -> Usage:
    into, out = used.prompt_tokens_details, used.completion_tokens_details
    return Usage(
        input=used.prompt_tokens,
        cached=(into.cached_tokens or 0) if into else 0,
        output=used.completion_tokens,
        reasoning=(out.reasoning_tokens or 0) if out else 0,
    )
