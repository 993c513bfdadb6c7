"""What is OpenAI's own: effort and summary, the cached prefix, failures inside a stream, the choice of protocol."""

from __future__ import annotations

import hashlib

import pytest
from hosted_models import openai_model
from scripted_server import Answer, Failure, Raw, ScriptedServer
from wire_formats import response_failed, sse

from kernel_agent.config import Effort
from kernel_agent.models import Conversation, NoticeKind
from kernel_agent.models.errors import CutStream, RefusedReply
from kernel_agent.models.openai import reasoning_effort
from kernel_agent.models.servers import Wire, wire_of


def test_responses_are_asked_with_effort_and_summary(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        openai_model(server, Wire.RESPONSES, effort=Effort.HIGH).ask(conversation)
    body = server.requests[0].body
    assert server.requests[0].path == "/v1/responses"
    assert body["reasoning"] == {"effort": "high", "summary": "auto"}
    assert body["instructions"] == "the contract"
    assert [message["role"] for message in body["input"]] == ["user", "assistant", "user"]


def test_nothing_is_stored_at_the_provider(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        openai_model(server, Wire.RESPONSES).ask(conversation)
    assert server.requests[0].body["store"] is False


def test_asks_of_one_run_share_the_key_of_the_prompt_cache(conversation: Conversation) -> None:
    shorter = conversation.model_copy(update={"turns": conversation.turns[:1]})
    with ScriptedServer(Answer("x")) as server:
        model = openai_model(server, Wire.RESPONSES)
        model.ask(shorter)
        model.ask(conversation)
    first, second = (request.body["prompt_cache_key"] for request in server.requests)
    assert first == second == hashlib.sha256(b"the contractthe forward and its pairs").hexdigest()[:32]


def test_an_unverified_organization_loses_the_summary_but_not_the_effort(conversation: Conversation) -> None:
    complaint = "Your organization must be verified to generate reasoning summaries."
    with ScriptedServer(Failure(400, complaint), Answer("x")) as server:
        reply = openai_model(server, Wire.RESPONSES).ask(conversation)
    assert server.requests[1].body["reasoning"] == {"effort": "medium"}
    assert [notice.kind for notice in reply.notices] == [NoticeKind.REQUEST_SIMPLIFIED]


@pytest.mark.parametrize("code", ["server_error", "rate_limit_exceeded"])
def test_a_response_that_fails_on_the_way_is_asked_for_once_more(conversation: Conversation, code: str) -> None:
    failed = Raw(response_failed(Answer(""), code, "an accident"))
    with ScriptedServer(failed, Answer("whole")) as server:
        assert openai_model(server, Wire.RESPONSES).ask(conversation).text == "whole"


def test_an_error_event_cuts_the_stream(conversation: Conversation) -> None:
    event = {"type": "error", "code": "server_error", "message": "an accident", "param": None, "sequence_number": 0}
    with ScriptedServer(Raw([sse(event, "error")])) as server, pytest.raises(CutStream, match="an accident"):
        openai_model(server, Wire.RESPONSES).ask(conversation)


def test_garbage_in_the_stream_cuts_it(conversation: Conversation) -> None:
    with ScriptedServer(Raw([sse('{"type": "response.crea')]), Answer("whole")) as server:
        assert openai_model(server, Wire.RESPONSES).ask(conversation).text == "whole"


def test_a_failure_by_policy_is_refused_and_not_retried(conversation: Conversation) -> None:
    failed = Raw(response_failed(Answer(""), "bio_policy", "not this"))
    with ScriptedServer(failed) as server, pytest.raises(RefusedReply, match="not this"):
        openai_model(server, Wire.RESPONSES).ask(conversation)
    assert len(server.requests) == 1


def test_a_request_stopped_by_policy_is_refused(conversation: Conversation) -> None:
    with ScriptedServer(Failure(400, "not this", code="invalid_prompt")) as server, pytest.raises(RefusedReply):
        openai_model(server, Wire.RESPONSES).ask(conversation)


def test_chat_completions_carry_system_turns_and_effort(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        openai_model(server, Wire.CHAT_COMPLETIONS, effort=Effort.LOW).ask(conversation)
    body = server.requests[0].body
    assert server.requests[0].path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["reasoning_effort"] == "low"
    assert body["stream_options"] == {"include_usage": True}


def test_chat_completions_take_turns(conversation: Conversation) -> None:
    # Chat templates of several open models refuse two user messages in a row.
    turns = (conversation.turns[0], conversation.turns[2])
    with ScriptedServer(Answer("x")) as server:
        openai_model(server, Wire.CHAT_COMPLETIONS).ask(conversation.model_copy(update={"turns": turns}))
    messages = server.requests[0].body["messages"]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"] == "the forward and its pairs\nthe verdict"


def test_ollamas_field_for_reasoning_is_read_too(conversation: Conversation) -> None:
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    deltas = [({"reasoning": "hm"}, None), ({"content": "x"}, "stop")]
    frames = [sse(chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}) for delta, end in deltas]
    with ScriptedServer(Raw(frames)) as server:
        reply = openai_model(server, Wire.CHAT_COMPLETIONS).ask(conversation)
    assert (reply.reasoning, reply.text) == ("hm", "x")


@pytest.mark.parametrize(
    ("model", "effort", "sent"),
    [
        ("gpt-6.1-sol", Effort.HIGH, Effort.HIGH),
        ("gpt-6.1-sol", Effort.MINIMAL, Effort.LOW),
        ("gpt-5-mini", Effort.MINIMAL, Effort.MINIMAL),
        ("o3", Effort.MINIMAL, Effort.LOW),
        ("gpt-4.1", Effort.HIGH, None),
        ("gpt-5-chat-latest", Effort.HIGH, None),
    ],
)
def test_effort_is_sent_only_where_it_is_understood(model: str, effort: Effort, sent: Effort | None) -> None:
    assert reasoning_effort(model, effort) is sent


@pytest.mark.parametrize(
    ("url", "wire"),
    [
        (None, Wire.RESPONSES),
        ("https://api.openai.com/v1", Wire.RESPONSES),
        ("https://eu.api.openai.com/v1", Wire.RESPONSES),
        ("http://localhost:11434/v1", Wire.CHAT_COMPLETIONS),
        ("https://api.openai.com.example.org/v1", Wire.CHAT_COMPLETIONS),
    ],
)
def test_the_server_decides_the_protocol(url: str | None, wire: Wire) -> None:
    assert wire_of(url) is wire


def test_a_limit_on_the_reply_is_sent_in_the_words_of_the_protocol(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x"), Answer("x")) as server:
        openai_model(server, Wire.RESPONSES).ask(conversation, max_output=5_000)
        openai_model(server, Wire.CHAT_COMPLETIONS).ask(conversation, max_output=5_000)
    responses, chat = (request.body for request in server.requests)
    assert responses["max_output_tokens"] == 5_000
    assert chat["max_tokens"] == 5_000
    assert "max_completion_tokens" not in chat


@pytest.mark.parametrize("wire", list(Wire))
def test_without_a_budget_no_limit_is_sent(conversation: Conversation, wire: Wire) -> None:
    with ScriptedServer(Answer("x")) as server:
        openai_model(server, wire).ask(conversation)
    assert not {"max_output_tokens", "max_tokens", "max_completion_tokens"} & set(server.requests[0].body)


def test_a_gateway_that_knows_the_newer_name_alone_still_gets_the_limit(conversation: Conversation) -> None:
    # Sent again without any limit, one reply could exceed the budget of the whole run.
    complaint = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    with ScriptedServer(Failure(400, complaint), Answer("x")) as server:
        openai_model(server, Wire.CHAT_COMPLETIONS).ask(conversation, max_output=5_000)
    assert server.requests[1].body["max_completion_tokens"] == 5_000
    assert "max_tokens" not in server.requests[1].body
