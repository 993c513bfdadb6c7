"""Asks and replies by file: whoever writes `replies/0001.md` is the model."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kernel_agent.errors import ExitCode, WaitingForReply
from kernel_agent.models import Conversation, Exchange, Notice, NoticeKind, Reply, Usage
from kernel_agent.models.errors import BadRecording
from kernel_agent.models.manual import ManualModel
from kernel_agent.models.protocol import UsageKind
from kernel_agent.models.tokens import estimate_tokens

QUICK = {"poll_s": 0.01, "settle_s": 0.02}


class Writer(threading.Thread):
    """Someone who waits for an ask and then types, piece by piece."""

    def __init__(self, run: Path, number: int, pieces: list[str], pause_s: float = 0.0) -> None:
        super().__init__()
        self._ask = run / "asks" / f"{number:04d}.md"
        self._reply = run / "replies" / f"{number:04d}.md"
        self._pieces = pieces
        self._pause_s = pause_s
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 10
        while not self._ask.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._reply.parent.mkdir(exist_ok=True)
        for piece in self._pieces:
            with open(self._reply, "a", encoding="utf-8") as file:
                file.write(piece)
            time.sleep(self._pause_s)


def test_a_reply_written_while_the_model_waits_is_taken(tmp_path: Path, conversation: Conversation) -> None:
    heard: list[str] = []
    writer = Writer(tmp_path, 1, ["the backward"])
    reply = ManualModel(tmp_path, **QUICK).ask(conversation, on_text=heard.append)
    writer.join()
    assert reply.text == "the backward"
    assert reply.model == "manual"
    assert reply.cost_usd is None
    assert heard == ["the backward"]


def test_the_ask_holds_the_whole_conversation_in_order(tmp_path: Path, conversation: Conversation) -> None:
    writer = Writer(tmp_path, 1, ["x"])
    ManualModel(tmp_path, **QUICK).ask(conversation)
    writer.join()
    text = (tmp_path / "asks" / "0001.md").read_text()
    places = [text.index(part) for part in (conversation.system, *(turn.text for turn in conversation.turns))]
    assert places == sorted(places)
    assert "replies/0001.md" in text


def test_a_reply_that_still_grows_is_not_taken(tmp_path: Path, conversation: Conversation) -> None:
    # The pieces come faster than the file settles: taking the first one would lose the others.
    writer = Writer(tmp_path, 1, ["one ", "two ", "three"], pause_s=0.1)
    reply = ManualModel(tmp_path, poll_s=0.01, settle_s=0.8).ask(conversation)
    writer.join()
    assert reply.text == "one two three"


def test_an_empty_file_is_no_reply_yet(tmp_path: Path, conversation: Conversation) -> None:
    writer = Writer(tmp_path, 1, ["", "\n", "the backward"], pause_s=0.1)
    reply = ManualModel(tmp_path, **QUICK).ask(conversation)
    writer.join()
    assert reply.text.strip() == "the backward"


def test_waiting_is_told_once(tmp_path: Path, conversation: Conversation) -> None:
    heard: list[Notice] = []
    writer = Writer(tmp_path, 1, ["", "", "x"], pause_s=0.05)
    reply = ManualModel(tmp_path, on_notice=heard.append, **QUICK).ask(conversation)
    writer.join()
    assert [notice.kind for notice in heard] == [NoticeKind.WAITING]
    assert "asks/0001.md" in heard[0].text
    # Paths of this machine stay out of the record.
    assert reply.notices == ()


def test_without_waiting_the_ask_is_left_and_the_way_back_is_told(tmp_path: Path, conversation: Conversation) -> None:
    run = tmp_path / "a run"
    with pytest.raises(WaitingForReply) as caught:
        ManualModel(run, wait=False, **QUICK).ask(conversation)
    assert caught.value.exit_code is ExitCode.WAITING
    assert str(run / "asks" / "0001.md") in str(caught.value)
    assert str(run / "replies" / "0001.md") in str(caught.value)
    # Quoted, so that it can be pasted.
    assert f"kernel-agent resume '{run}'" in str(caught.value)
    assert (run / "asks" / "0001.md").is_file()


def test_without_waiting_a_reply_that_is_there_is_taken(tmp_path: Path, conversation: Conversation) -> None:
    model = ManualModel(tmp_path, wait=False, **QUICK)
    with pytest.raises(WaitingForReply):
        model.ask(conversation)
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "0001.md").write_text("the backward")
    assert model.ask(conversation).text == "the backward"


def test_asks_are_numbered_on(tmp_path: Path, conversation: Conversation) -> None:
    model = ManualModel(tmp_path, **QUICK)
    writers = [Writer(tmp_path, number, [f"reply {number}"]) for number in (1, 2)]
    assert [model.ask(conversation).text for _ in writers] == ["reply 1", "reply 2"]
    for writer in writers:
        writer.join()


def test_a_resumed_run_goes_on_behind_the_replies_it_has_taken(tmp_path: Path, conversation: Conversation) -> None:
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "0002.md").write_text("reply 2")
    Exchange(tmp_path).write_reply(1, Reply(text="reply 1", model="manual"))
    assert ManualModel(tmp_path, **QUICK).ask(conversation).text == "reply 2"


def test_a_reply_whose_taking_was_interrupted_is_taken_again(tmp_path: Path, conversation: Conversation) -> None:
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "0001.md").write_text("reply 1")
    # Two processes that were killed before they could record the reply, then a third.
    texts = [ManualModel(tmp_path, **QUICK).ask(conversation).text for _ in range(3)]
    assert texts == ["reply 1"] * 3


def _answered_before(run: Path, conversation: Conversation) -> Conversation:
    with pytest.raises(WaitingForReply):
        ManualModel(run, wait=False, **QUICK).ask(conversation)
    (run / "replies").mkdir()
    (run / "replies" / "0001.md").write_text("x")
    return conversation.model_copy(update={"system": "another contract"})


def test_an_ask_that_changed_after_its_reply_is_told_and_kept(tmp_path: Path, conversation: Conversation) -> None:
    changed = _answered_before(tmp_path, conversation)
    reply = ManualModel(tmp_path, **QUICK).ask(changed)
    assert [notice.kind for notice in reply.notices] == [NoticeKind.ASK_CHANGED]
    assert "the contract" in (tmp_path / "asks" / "0001.md").read_text()


def test_an_ask_that_changed_before_any_reply_is_written_anew(tmp_path: Path, conversation: Conversation) -> None:
    changed = conversation.model_copy(update={"system": "another contract"})
    for asked in (conversation, changed):
        with pytest.raises(WaitingForReply):
            ManualModel(tmp_path, wait=False, **QUICK).ask(asked)
    assert "another contract" in (tmp_path / "asks" / "0001.md").read_text()


def test_facts_beside_a_reply_are_read(tmp_path: Path, conversation: Conversation) -> None:
    class Careful(Writer):
        def run(self) -> None:
            super().run()
            self._reply.with_suffix(".json").write_text('{"model": "some-chat", "usage": {"input": 5, "output": 7}}')

    writer = Careful(tmp_path, 1, ["x"])
    reply = ManualModel(tmp_path, poll_s=0.01, settle_s=0.3).ask(conversation)
    writer.join()
    assert reply.model == "some-chat"
    assert reply.usage == Usage(input=5, output=7)


def test_a_reply_in_another_encoding_names_its_file(tmp_path: Path, conversation: Conversation) -> None:
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "0001.md").write_bytes(b"caf\xe9")
    with pytest.raises(BadRecording, match=r"replies/0001\.md is not UTF-8"):
        ManualModel(tmp_path, **QUICK).ask(conversation)


def test_damaged_facts_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "0001.md").write_text("x")
    (tmp_path / "replies" / "0001.json").write_text("{")
    with pytest.raises(BadRecording, match=r"replies/0001\.json is no record"):
        Exchange(tmp_path).read_reply(1, model="manual")


def test_tokens_of_a_written_reply_are_estimated_and_say_so(tmp_path: Path, conversation: Conversation) -> None:
    # Zeros would let a ledger disagree with what is counted off its prompts.
    Exchange(tmp_path).write_ask(1, conversation)
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "0001.md").write_text("def backward(): ...")
    usage = ManualModel(tmp_path, wait=False, settle_s=0.0).ask(conversation).usage
    texts = (conversation.system, *(turn.text for turn in conversation.turns))
    assert usage.kind is UsageKind.ESTIMATED
    assert usage.input == sum(map(estimate_tokens, texts))
    assert usage.output == estimate_tokens("def backward(): ...")
