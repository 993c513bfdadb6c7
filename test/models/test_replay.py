"""Recorded replies in order; what has changed since is told, what is missing is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_run import FORWARD, record

from kernel_agent.models import Conversation, Exchange, Notice, NoticeKind, StopReason
from kernel_agent.models.errors import BadRecording, ReplayExhausted
from kernel_agent.models.replay import ReplayModel, find_recording


def test_replies_come_back_in_order_with_all_that_was_known(tmp_path: Path, conversation: Conversation) -> None:
    recorded = record(tmp_path / "run", conversation, "first", "second", "third")
    model = ReplayModel(tmp_path / "run", tmp_path / "new")
    assert [model.ask(conversation) for _ in recorded] == recorded


def test_text_is_handed_on_as_progress(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "run", conversation, "first")
    heard: list[str] = []
    ReplayModel(tmp_path / "run", tmp_path / "new").ask(conversation, on_text=heard.append)
    assert heard == ["first"]


def test_an_ask_that_is_the_same_is_not_remarked_on(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "run", conversation, "first")
    assert ReplayModel(tmp_path / "run", tmp_path / "new").ask(conversation).notices == ()


def test_an_ask_that_changed_is_told_and_answered_all_the_same(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "run", conversation, "first")
    heard: list[Notice] = []
    changed = conversation.model_copy(update={"turns": conversation.turns[:1]})
    reply = ReplayModel(tmp_path / "run", tmp_path / "new", on_notice=heard.append).ask(changed)
    assert reply.text == "first"
    assert [notice.kind for notice in reply.notices] == [NoticeKind.ASK_CHANGED]
    assert tuple(heard) == reply.notices


def test_a_reply_without_its_ask_is_told_too(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "run", conversation, "first")
    (tmp_path / "run" / "asks" / "0001.md").unlink()
    reply = ReplayModel(tmp_path / "run", tmp_path / "new").ask(conversation)
    assert [notice.kind for notice in reply.notices] == [NoticeKind.ASK_CHANGED]


def test_the_last_reply_is_followed_by_a_clear_error(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "run", conversation, "only")
    model = ReplayModel(tmp_path / "run", tmp_path / "new")
    model.ask(conversation)
    with pytest.raises(ReplayExhausted, match="holds 1 replies and this run asks for one more"):
        model.ask(conversation)


def test_a_resumed_replay_goes_on_behind_the_replies_it_has_taken(tmp_path: Path, conversation: Conversation) -> None:
    first, _ = record(tmp_path / "run", conversation, "first", "second")
    Exchange(tmp_path / "new").write_reply(1, first)
    assert ReplayModel(tmp_path / "run", tmp_path / "new").ask(conversation).text == "second"


def test_replies_without_facts_are_enough(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "run", conversation, "first")
    (tmp_path / "run" / "replies" / "0001.json").unlink()
    reply = ReplayModel(tmp_path / "run", tmp_path / "new").ask(conversation)
    assert (reply.text, reply.model, reply.stop) == ("first", "replay of run", StopReason.COMPLETE)


def test_a_folder_without_replies_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match=r"no recorded replies"):
        ReplayModel(tmp_path, tmp_path / "new")


def test_a_recording_moves_with_its_folder(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "here", conversation, "first")
    (tmp_path / "here").rename(tmp_path / "there")
    assert ReplayModel(tmp_path / "there", tmp_path / "new").ask(conversation).notices == ()


def test_a_recording_is_found_by_the_hash_of_its_forward(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "a", conversation, "first", source="another = 1")
    record(tmp_path / "b", conversation, "first")
    # Line ends are no part of what a forward computes.
    assert find_recording(FORWARD.replace("\n", "\r\n"), tmp_path) == tmp_path / "b"


def test_no_recording_is_found_for_an_unknown_forward(tmp_path: Path, conversation: Conversation) -> None:
    record(tmp_path / "a", conversation, "first")
    (tmp_path / "README.md").write_text("not a run")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "trace.jsonl").write_text("{")
    assert find_recording("something = else", tmp_path) is None
