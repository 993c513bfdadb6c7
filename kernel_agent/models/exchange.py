"""`Exchange`: asks and replies of a run as files, so that a person can answer them and a recorded run can be replayed.

    RUN/trace.jsonl          the ledger; only the first line is read here, for the hash of the forward
        asks/0001.md         the whole conversation as sent
        replies/0001.md      the reply's text, verbatim
        replies/0001.json    everything else that is known of the reply: a `Reply` without `text` (optional)

Numbers count the asks of a run from 1, without gaps. `manual` writes asks and waits for replies, `replay` reads the
replies of a recorded run, and the loop keeps both for every model. It writes the `.json` when it takes a reply, so
those files tell how far a run has come: an interrupted run neither skips a reply nor takes one twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from kernel_agent.models.errors import BadRecording
from kernel_agent.models.protocol import Conversation, Reply
from kernel_agent.pairs.spec import content_hash
from kernel_agent.wholefile import write_whole


@dataclass(frozen=True)
class Exchange:
    """The asks and replies of one run folder."""

    run: Path
    """The folder of the run. `asks` and `replies` in it are made when needed."""

    def ask_path(self, number: int) -> Path:
        """Where an ask lies."""
        return self.run / "asks" / f"{number:04d}.md"

    def reply_path(self, number: int) -> Path:
        """Where the text of a reply lies."""
        return self.run / "replies" / f"{number:04d}.md"

    def facts_path(self, number: int) -> Path:
        """Where the rest of a reply lies."""
        return self.reply_path(number).with_suffix(".json")

    def has_ask(self, number: int) -> bool:
        """True when the ask was written."""
        return self.ask_path(number).is_file()

    def has_reply(self, number: int) -> bool:
        """True when there is a reply with text in it."""
        path = self.reply_path(number)
        return path.is_file() and bool(path.read_bytes().strip())

    def received(self) -> int:
        """How many replies the run has taken: those with a record of their facts, counted up to the first without."""
        number = 0
        while self.has_reply(number + 1) and self.facts_path(number + 1).is_file():
            number += 1
        return number

    def same_ask(self, number: int, conversation: Conversation) -> bool:
        """True when the ask on disk is this conversation, blanks at line ends aside."""
        return self.has_ask(number) and content_hash(_read(self.ask_path(number))) == content_hash(
            ask_text(number, conversation)
        )

    def write_ask(self, number: int, conversation: Conversation) -> Path:
        """Write an ask, or replace one that nobody has answered."""
        return write_whole(self.ask_path(number), ask_text(number, conversation))

    def write_reply(self, number: int, reply: Reply) -> Path:
        """Write a reply and what is known of it. A text that is there already is left as it is."""
        path = self.reply_path(number)
        if not self.has_reply(number):
            write_whole(path, reply.text)
        write_whole(self.facts_path(number), reply.model_dump_json(exclude={"text"}, indent=2) + "\n")
        return path

    def read_reply(self, number: int, *, model: str) -> Reply:
        """A reply; `model` is the name it gets when the facts beside it do not say. Raises `BadRecording`."""
        text = _read(self.reply_path(number))
        facts = self.facts_path(number)
        if not facts.is_file():
            return Reply(text=text, model=model)
        try:
            return Reply.model_validate({"model": model, **json.loads(_read(facts)), "text": text})
        except (ValueError, TypeError, ValidationError) as error:
            raise BadRecording(f"{facts} is no record of a reply: {error}", remedy="repair or remove it") from error


def ask_text(number: int, conversation: Conversation) -> str:
    """A conversation as one Markdown file that can be pasted into a chat window or given to a coding agent."""
    head = (
        f"<!-- kernel-agent, ask {number:04d}: put the whole answer into ../replies/{number:04d}.md.\n"
        "     In a chat that holds the earlier asks, the part below the last marker is enough. -->"
    )
    parts = [head, "<!-- system -->", conversation.system.strip("\n")]
    for turn in conversation.turns:
        parts += [f"<!-- {turn.role.value} -->", turn.text.strip("\n")]
    return "\n\n".join(parts) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRecording(f"{path} is not UTF-8 text", remedy="save it as UTF-8") from error
