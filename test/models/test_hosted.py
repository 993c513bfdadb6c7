"""What holds for every provider: the real SDKs against a server that answers, fails, cuts, refuses and rambles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hosted_models import SECRET
from scripted_server import Answer, Cut, Failure, Page, ScriptedServer

from kernel_agent.config import Backend, RunConfig
from kernel_agent.errors import ExitCode
from kernel_agent.models import Conversation, Model, ModelError, Notice, NoticeKind, StopReason, Usage, make_model
from kernel_agent.models.errors import CutStream, KeyRejected, ProviderUnavailable, RequestRejected, WrongProtocol

Build = Callable[..., Model]
TWO_BLOCKS = "First:\n```python\na = 1\n```\nor rather:\n```python\nb = 2\n```\n"


def test_a_reply_brings_text_reasoning_and_usage(build: Build, conversation: Conversation) -> None:
    usage = Usage(input=1000, cached=200, output=300, reasoning=120)
    with ScriptedServer(Answer("the backward", reasoning="first the chain rule", usage=usage)) as server:
        reply = build(server).ask(conversation)
    assert reply.text == "the backward"
    assert reply.reasoning == "first the chain rule"
    assert reply.usage == usage
    assert reply.stop is StopReason.COMPLETE
    assert reply.latency_s > 0
    assert reply.notices == ()


def test_text_streams_in_pieces_while_it_arrives(build: Build, conversation: Conversation) -> None:
    heard: list[str] = []
    with ScriptedServer(Answer("one two three four")) as server:
        build(server).ask(conversation, on_text=heard.append)
    assert len(heard) > 1
    assert "".join(heard) == "one two three four"


def test_the_cost_follows_from_usage_and_price(build: Build, conversation: Conversation) -> None:
    usage = Usage(input=1_000_000, cached=400_000, output=100_000)
    with ScriptedServer(Answer("x", usage=usage, model="gpt-5-2025-08-07")) as server:
        reply = build(server).ask(conversation)
    # gpt-5: 1.25 plain input, 0.125 cached, 10 output. Billing cached tokens as plain ones gives 2.25.
    assert reply.cost_usd == pytest.approx(0.6 * 1.25 + 0.4 * 0.125 + 0.1 * 10)


def test_a_model_without_a_price_has_no_cost(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Answer("x", model="home-grown")) as server:
        reply = build(server, name="home-grown").ask(conversation)
    assert reply.cost_usd is None


def test_a_server_that_does_not_count_gets_an_estimate_that_says_so(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Answer("five words of plain text", usage=None)) as server:
        reply = build(server).ask(conversation)
    # A silent zero would let a run pass its token budget for ever.
    assert reply.usage.input > 0
    assert reply.usage.output > 0
    assert [notice.kind for notice in reply.notices] == [NoticeKind.USAGE_ESTIMATED]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_retried(build: Build, conversation: Conversation, status: int) -> None:
    with ScriptedServer(Failure(status), Failure(status), Answer("at last")) as server:
        reply = build(server).ask(conversation)
    assert reply.text == "at last"
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [429, 500])
def test_a_lasting_failure_ends_as_provider_unavailable(build: Build, conversation: Conversation, status: int) -> None:
    with (
        ScriptedServer(Failure(status, "down for maintenance")) as server,
        pytest.raises(ProviderUnavailable) as caught,
    ):
        build(server).ask(conversation)
    assert "down for maintenance" in str(caught.value)
    assert str(status) in str(caught.value)
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert len(server.requests) == 5


def test_a_server_that_is_not_there_ends_as_provider_unavailable(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        model = build(server)
    model._max_retries = 0  # type: ignore[attr-defined]  # a refused connection has no Retry-After to keep it short
    with pytest.raises(ProviderUnavailable, match=r"cannot reach 127\.0\.0\.1"):
        model.ask(conversation)


@pytest.mark.parametrize("abrupt", [True, False], ids=["connection broken", "end missing"])
def test_a_cut_stream_is_asked_for_once_more(build: Build, conversation: Conversation, abrupt: bool) -> None:
    heard: list[Notice] = []
    with ScriptedServer(Cut(Answer("half of a reply"), abrupt=abrupt), Answer("a whole reply")) as server:
        reply = build(server, on_notice=heard.append).ask(conversation)
    # Taking what had arrived for the reply would hand half a kernel to the gate.
    assert reply.text == "a whole reply"
    assert [notice.kind for notice in reply.notices] == [NoticeKind.STREAM_CUT]
    assert tuple(heard) == reply.notices
    assert len(server.requests) == 2


@pytest.mark.parametrize("abrupt", [True, False], ids=["connection broken", "end missing"])
def test_a_stream_cut_twice_is_an_error(build: Build, conversation: Conversation, abrupt: bool) -> None:
    with ScriptedServer(Cut(Answer("half of a reply"), abrupt=abrupt)) as server, pytest.raises(CutStream):
        build(server).ask(conversation)
    assert len(server.requests) == 2


def test_a_refusal_is_a_reply(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Answer("I cannot help with that.", stop=StopReason.REFUSAL)) as server:
        reply = build(server).ask(conversation)
    assert reply.stop is StopReason.REFUSAL
    assert reply.text == "I cannot help with that."


def test_a_reply_that_ran_out_of_tokens_says_so(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Answer("def backw", stop=StopReason.LENGTH)) as server:
        reply = build(server).ask(conversation)
    assert reply.stop is StopReason.LENGTH
    assert reply.text == "def backw"


@pytest.mark.parametrize("text", ["I would rather talk about it.", TWO_BLOCKS, "```python\nx = 'é ∂ 漢'\n```"])
def test_text_is_delivered_as_it_was_sent(build: Build, conversation: Conversation, text: str) -> None:
    with ScriptedServer(Answer(text)) as server:
        assert build(server).ask(conversation).text == text


def test_a_rejected_request_is_neither_retried_nor_hidden(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Failure(404, "no such model")) as server, pytest.raises(RequestRejected) as caught:
        build(server).ask(conversation)
    assert caught.value.status == 404
    assert "no such model" in caught.value.message
    assert "--model" in caught.value.remedy
    assert len(server.requests) == 1


def test_a_part_the_server_does_not_know_is_left_out_and_told(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Failure(400, "model does not support thinking"), Answer("fine")) as server:
        model = build(server)
        first = model.ask(conversation)
        second = model.ask(conversation)
    assert [notice.kind for notice in first.notices] == [NoticeKind.REQUEST_SIMPLIFIED]
    for name in ("reasoning", "reasoning_effort", "thinking", "output_config"):
        assert name not in server.requests[1].body
    # Learned once: the second ask does not run into the same wall.
    assert second.notices == ()
    assert len(server.requests) == 3


def test_a_server_that_complains_for_ever_is_not_asked_for_ever(build: Build, conversation: Conversation) -> None:
    complaint = Failure(400, "thinking, reasoning, cache_control, summary, stream_options: all wrong")
    with ScriptedServer(complaint) as server, pytest.raises(RequestRejected):
        build(server).ask(conversation)
    assert len(server.requests) <= 5


def test_no_temperature_is_sent(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        build(server).ask(conversation)
    assert "temperature" not in server.requests[0].body


def test_the_key_goes_to_the_server_and_nowhere_else(
    build: Build, conversation: Conversation, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Notice] = []
    script = (Failure(400, f"reasoning with key {SECRET}: thinking is off"), Cut(Answer("hal")), Answer("x"))
    with caplog.at_level("DEBUG"), ScriptedServer(*script) as server:
        model = build(server, on_notice=heard.append)
        reply = model.ask(conversation)
    assert SECRET in json_headers(server)
    assert SECRET not in reply.model_dump_json()
    assert all(SECRET not in notice.text for notice in heard)
    assert SECRET not in repr(vars(model))
    assert SECRET not in caplog.text


@pytest.mark.parametrize("status", [400, 401, 429])
def test_an_error_that_repeats_the_key_is_redacted(build: Build, conversation: Conversation, status: int) -> None:
    failure = Failure(status, f"Incorrect API key provided: {SECRET}")
    with ScriptedServer(failure) as server, pytest.raises(ModelError) as caught:
        build(server).ask(conversation)
    assert SECRET not in str(caught.value)


def test_a_rejected_key_names_its_variable(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Failure(401, "who are you?")) as server, pytest.raises(KeyRejected, match=r"_API_KEY"):
        build(server).ask(conversation)


def test_a_server_that_wants_a_key_where_none_is_set_says_which(conversation: Conversation) -> None:
    # "does not accept the key in OPENAI_API_KEY" sends people to look for a key that they never set.
    with ScriptedServer(Failure(401, "unused is no key")) as server:
        config = RunConfig(file=Path("x.py"), base_url=server.openai_url, model="m", backend=Backend.OPENAI)
        with pytest.raises(KeyRejected, match=r"wants a key .* OPENAI_API_KEY is not set") as refused:
            make_model(config, Path("run"), environ={}).ask(conversation)
    assert "set OPENAI_API_KEY" in refused.value.remedy


def test_a_web_page_is_told_from_a_cut_reply(build: Build, conversation: Conversation) -> None:
    with ScriptedServer(Page()) as server, pytest.raises(WrongProtocol, match="does not speak the protocol"):
        build(server).ask(conversation)
    assert len(server.requests) == 1, "asking again brings the same page"


def json_headers(server: ScriptedServer) -> str:
    """All headers of the first request."""
    return repr(server.requests[0].headers)
