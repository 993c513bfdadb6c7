"""Answers of a provider as its server-sent events: Responses, chat completions, Anthropic Messages.

Field by field what the providers send, as far as a client can see it; every text comes in several pieces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kernel_agent.models import StopReason, Usage

Event = dict[str, Any]
COUNTED = Usage(input=1000, cached=200, output=300, reasoning=120)


@dataclass(frozen=True)
class Answer:
    """A whole reply."""

    text: str
    reasoning: str = ""
    stop: StopReason = StopReason.COMPLETE
    usage: Usage | None = COUNTED
    """None: a server that does not count."""
    model: str = "some-model"


def pieces(text: str, count: int = 4) -> list[str]:
    """The text in `count` parts, whatever falls between them."""
    size = max(1, -(-len(text) // count))
    return [text[start : start + size] for start in range(0, len(text), size)]


def sse(event: Event | str, name: str | None = None) -> bytes:
    """One server-sent event."""
    data = event if isinstance(event, str) else json.dumps(event)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


def responses(answer: Answer) -> list[bytes]:
    """OpenAI's Responses protocol."""
    refused = answer.stop is StopReason.REFUSAL
    part = (
        {"type": "refusal", "refusal": answer.text}
        if refused
        else {"type": "output_text", "text": answer.text, "annotations": []}
    )
    output: list[Event] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"id": "rs_1", "type": "reasoning", "summary": summary})
    output.append({"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]})
    cut_short = answer.stop is StopReason.LENGTH
    final = _response(
        answer,
        status="incomplete" if cut_short else "completed",
        output=output,
        incomplete_details={"reason": "max_output_tokens"} if cut_short else None,
    )
    kind = "response.refusal.delta" if refused else "response.output_text.delta"
    events = [{"type": "response.created", "response": _response(answer, status="in_progress", output=[])}]
    events += [
        {"type": kind, "item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": piece, "logprobs": []}
        for piece in pieces(answer.text)
    ]
    events.append({"type": "response.incomplete" if cut_short else "response.completed", "response": final})
    return [sse(event | {"sequence_number": index}, event["type"]) for index, event in enumerate(events)]


def response_failed(answer: Answer, code: str, message: str) -> list[bytes]:
    """A Responses stream that ends with `response.failed`."""
    failed = _response(answer, status="failed", output=[], error={"code": code, "message": message})
    return [sse({"type": "response.failed", "response": failed, "sequence_number": 0}, "response.failed")]


def _response(answer: Answer, *, status: str, output: list[Event], **more: Any) -> Event:
    usage = answer.usage
    counted = usage and {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.cache_written},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }
    base = {"id": "resp_1", "object": "response", "created_at": 0, "model": answer.model, "status": status}
    fixed = {"output": output, "usage": counted, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return base | fixed | {"error": None, "incomplete_details": None} | more


def chat(answer: Answer) -> list[bytes]:
    """Chat completions, with reasoning in vLLM's field."""
    finish = {StopReason.COMPLETE: "stop", StopReason.LENGTH: "length", StopReason.REFUSAL: "stop"}[answer.stop]
    field = "refusal" if answer.stop is StopReason.REFUSAL else "content"
    deltas: list[Event] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(answer.reasoning)]
    deltas += [{field: piece} for piece in pieces(answer.text)]
    chunks = [_chunk(answer, [{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    chunks.append(_chunk(answer, [{"index": 0, "delta": {}, "finish_reason": finish}]))
    if answer.usage is not None:
        used = {
            "prompt_tokens": answer.usage.input,
            "completion_tokens": answer.usage.output,
            "total_tokens": answer.usage.input + answer.usage.output,
            "prompt_tokens_details": {"cached_tokens": answer.usage.cached},
            "completion_tokens_details": {"reasoning_tokens": answer.usage.reasoning},
        }
        chunks.append(_chunk(answer, []) | {"usage": used})
    return [*(sse(chunk) for chunk in chunks), sse("[DONE]")]


def _chunk(answer: Answer, choices: list[Event]) -> Event:
    return {"id": "chat_1", "object": "chat.completion.chunk", "created": 0, "model": answer.model, "choices": choices}


def messages(answer: Answer) -> list[bytes]:
    """Anthropic's Messages protocol: `usage.input_tokens` does not count cached tokens."""
    usage = answer.usage or Usage()
    plain = usage.input - usage.cached - usage.cache_written
    into = {
        "input_tokens": plain,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": usage.cache_written,
    }
    start = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
    }
    events: list[Event] = [
        {"type": "message_start", "message": start | {"usage": into | {"output_tokens": 1}}},
        {"type": "ping"},
    ]
    if answer.reasoning:
        events += _block(0, {"type": "thinking", "thinking": "", "signature": ""}, "thinking", answer.reasoning)
    events += _block(1, {"type": "text", "text": ""}, "text", answer.text)
    stop = {StopReason.COMPLETE: "end_turn", StopReason.LENGTH: "max_tokens", StopReason.REFUSAL: "refusal"}[
        answer.stop
    ]
    out = {"output_tokens": usage.output, "output_tokens_details": {"thinking_tokens": usage.reasoning}}
    events.append({"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": out})
    events.append({"type": "message_stop"})
    return [sse(event, event["type"]) for event in events]


def _block(index: int, empty: Event, kind: str, text: str) -> list[Event]:
    deltas = [
        {"type": "content_block_delta", "index": index, "delta": {"type": f"{kind}_delta", kind: piece}}
        for piece in pieces(text)
    ]
    start = {"type": "content_block_start", "index": index, "content_block": empty}
    return [start, *deltas, {"type": "content_block_stop", "index": index}]
