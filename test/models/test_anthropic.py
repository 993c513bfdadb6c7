"""What is Anthropic's own: the cached prefix and its bill, thinking budgets and efforts, errors inside a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosted_models import anthropic_model
from scripted_server import Answer, Raw, ScriptedServer
from wire_formats import messages, sse

from kernel_agent.config import Effort
from kernel_agent.models import Conversation, Usage
from kernel_agent.models.anthropic import EFFORTS, THINKING_BUDGETS, thinking_of
from kernel_agent.models.defaults import DEFAULT_MODELS
from kernel_agent.models.errors import CutStream

MARK = {"type": "ephemeral"}


def test_system_and_first_turn_are_marked_for_the_cache(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        anthropic_model(server).ask(conversation)
    body = server.requests[0].body
    assert body["system"] == [{"type": "text", "text": "the contract", "cache_control": MARK}]
    assert body["messages"][0]["content"][0]["cache_control"] == MARK
    # Later turns change from ask to ask: a mark there would pay for writing what is never read.
    assert all("cache_control" not in block for message in body["messages"][1:] for block in message["content"])


def test_a_request_after_the_opening_is_a_block_of_its_own(conversation: Conversation) -> None:
    # A first ask is the opening and a request: as one block, the next ask would find nothing of it in the cache.
    turns = (conversation.turns[0], conversation.turns[2])
    with ScriptedServer(Answer("x")) as server:
        anthropic_model(server).ask(conversation.model_copy(update={"turns": turns}))
    (message,) = server.requests[0].body["messages"]
    assert [block["text"] for block in message["content"]] == ["the forward and its pairs", "the verdict"]
    assert ["cache_control" in block for block in message["content"]] == [True, False]


def test_tokens_in_the_cache_are_part_of_the_input(conversation: Conversation) -> None:
    usage = Usage(input=1000, cached=600, cache_written=300, output=10)
    with ScriptedServer(Answer("x", usage=usage, model="claude-opus-5-5")) as server:
        reply = anthropic_model(server).ask(conversation)
    # The API itself reports input_tokens=100 here.
    assert reply.usage == usage


def test_writing_the_cache_is_billed_at_its_own_rate(conversation: Conversation) -> None:
    usage = Usage(input=1_000_000, cached=600_000, cache_written=300_000, output=10_000)
    with ScriptedServer(Answer("x", usage=usage, model="claude-opus-5-5")) as server:
        reply = anthropic_model(server).ask(conversation)
    # claude-opus-5-5: 4 plain, 0.2 read, 5 written, 20 output.
    assert reply.cost_usd == pytest.approx(0.1 * 4 + 0.6 * 0.2 + 0.3 * 5 + 0.01 * 20)


def test_recent_models_are_sent_an_effort(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        anthropic_model(server, "claude-opus-5-5", Effort.HIGH).ask(conversation)
    body = server.requests[0].body
    assert body["thinking"] == {"type": "adaptive", "display": "summarized"}
    assert body["output_config"] == {"effort": "high"}


@pytest.mark.parametrize("effort", [Effort.LOW, Effort.MEDIUM, Effort.HIGH])
def test_earlier_models_are_sent_a_budget_with_room_for_the_answer(conversation: Conversation, effort: Effort) -> None:
    with ScriptedServer(Answer("x")) as server:
        anthropic_model(server, "claude-haiku-4-5", effort).ask(conversation)
    body = server.requests[0].body
    assert body["thinking"] == {"type": "enabled", "budget_tokens": THINKING_BUDGETS[effort]}
    assert body["max_tokens"] > body["thinking"]["budget_tokens"]
    assert "output_config" not in body


def test_minimal_effort_turns_thinking_off_in_earlier_models(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        anthropic_model(server, "claude-haiku-4-5", Effort.MINIMAL).ask(conversation)
    assert "thinking" not in server.requests[0].body


@pytest.mark.parametrize(
    ("model", "budgeted"),
    [
        ("claude-3-7-sonnet-20250219", True),
        ("claude-opus-4-20250514", True),
        ("claude-sonnet-4-5-20250929", True),
        ("claude-opus-4-5", True),
        ("claude-opus-4-6", False),
        ("claude-sonnet-5", False),
        ("claude-haiku-5-5", False),
        ("claude-fable-5-2", False),
        ("glm-5", True),
    ],
)
def test_the_generation_decides_between_budget_and_effort(model: str, budgeted: bool) -> None:
    thinking = thinking_of(model, Effort.MEDIUM)
    assert (thinking.budget is not None) is budgeted
    assert (thinking.effort is None) is budgeted


def test_an_overload_inside_the_stream_is_asked_for_once_more(conversation: Conversation) -> None:
    overload = sse({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "error")
    with ScriptedServer(Raw([*messages(Answer("half"))[:4], overload]), Answer("whole")) as server:
        assert anthropic_model(server).ask(conversation).text == "whole"


def test_a_lasting_overload_inside_the_stream_is_a_cut(conversation: Conversation) -> None:
    overload = sse({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "error")
    with ScriptedServer(Raw([overload])) as server, pytest.raises(CutStream, match="Overloaded"):
        anthropic_model(server).ask(conversation)


def test_the_table_in_the_docs_holds_the_budgets() -> None:
    table = Path(__file__).parents[2].joinpath("docs", "models.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    for effort in Effort:
        thinking = thinking_of("claude-haiku-4-5", effort)
        assert rows[effort.value].endswith(f"| {thinking.budget or 'no thinking'} | {thinking.max_tokens} |")
        assert f"| `{EFFORTS[effort]}` |" in rows[effort.value]
    assert all(f"`{name}`" in table for name in DEFAULT_MODELS.values())


def test_a_limit_on_the_reply_is_sent(conversation: Conversation) -> None:
    with ScriptedServer(Answer("x")) as server:
        anthropic_model(server, "claude-opus-5-5").ask(conversation, max_output=5_000)
    assert server.requests[0].body["max_tokens"] == 5_000


@pytest.mark.parametrize(("limit", "budget"), [(9_000, 4_500), (2_000, None), (100_000, THINKING_BUDGETS[Effort.HIGH])])
def test_a_limit_leaves_half_of_it_to_the_answer(conversation: Conversation, limit: int, budget: int | None) -> None:
    # The API refuses a thinking budget that is not below the limit, and one below 1,024.
    with ScriptedServer(Answer("x")) as server:
        anthropic_model(server, "claude-haiku-4-5", Effort.HIGH).ask(conversation, max_output=limit)
    body = server.requests[0].body
    assert body["max_tokens"] <= limit
    assert body.get("thinking", {}).get("budget_tokens") == budget
