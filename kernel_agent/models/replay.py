"""`ReplayModel`: the replies of a recorded run, in order, without network or key.

A recorded run is the folder described in `kernel_agent.models.exchange`; `LOGS/` holds some. Replies are matched by
order, not by content: prompts change from release to release, and the gate judges every reply anew anyway.
"""

from __future__ import annotations

import json
from pathlib import Path

from kernel_agent.models.errors import BadRecording, ReplayExhausted
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.protocol import Conversation, Notice, NoticeKind, OnNotice, Progress, Reply, Usage, unheard
from kernel_agent.models.usage import estimated_usage
from kernel_agent.pairs.spec import content_hash


class ReplayModel:
    """Answers the nth ask with the nth recorded reply, with the usage, cost and latency it had then."""

    def __init__(self, recording: Path, run: Path, *, on_notice: OnNotice = unheard) -> None:
        """`run`: the folder of the run that asks; what it has taken tells where to go on. Raises `BadRecording`."""
        self.name = f"replay of {recording.name}"
        self._recording = Exchange(recording)
        self._asking = Exchange(run)
        self._taken = 0
        self._on_notice = on_notice
        if not self._recording.has_reply(1):
            raise BadRecording(
                f"{recording} holds no recorded replies", remedy="give the folder of a run: replies/0001.md is missing"
            )

    @property
    def limit(self) -> int:
        """Recorded replies, up to the first gap."""
        number = 0
        while self._recording.has_reply(number + 1):
            number += 1
        return number

    def ask(
        self,
        conversation: Conversation,
        *,
        number: int | None = None,
        on_text: Progress | None = None,
        max_output: int | None = None,  # noqa: ARG002 - what is written already, or by a person, is not cut
    ) -> Reply:
        """The recorded reply to the ask with this number. Raises `ReplayExhausted` after the last one."""
        number = number or max(self._taken, self._asking.received()) + 1
        if not self._recording.has_reply(number):
            raise ReplayExhausted(
                f"{self._recording.run} holds {number - 1} replies and this run asks for one more",
                remedy="it judged them otherwise than the recorded run: use --backend openai, anthropic or manual",
            )
        reply = self._recording.read_reply(number, model=self.name)
        notices = self._compare(number, conversation)
        self._taken = number
        if on_text is not None:
            on_text(reply.text)
        usage = estimated_usage(conversation, reply) if reply.usage == Usage() else reply.usage
        return reply.model_copy(update={"usage": usage, "notices": notices})

    def _compare(self, number: int, conversation: Conversation) -> tuple[Notice, ...]:
        if self._recording.same_ask(number, conversation):
            return ()
        was = "differs from the recorded one" if self._recording.has_ask(number) else "was not recorded"
        notice = Notice(
            kind=NoticeKind.ASK_CHANGED, text=f"ask {number} {was}; its recorded reply is used all the same"
        )
        self._on_notice(notice)
        return (notice,)


def find_recording(source: str, root: Path) -> Path | None:
    """The recorded run under `root` that was made for this forward, the last by name; None when there is none."""
    wanted = content_hash(source)[:8]
    runs = (path for path in sorted(root.iterdir(), reverse=True) if recorded_hash(path) == wanted)
    return next((run for run in runs if Exchange(run).has_reply(1)), None)


def recorded_hash(run: Path) -> str | None:
    """The first 8 hex digits of the hash of a run's forward, from the first event of its ledger; None without one."""
    ledger = run / "trace.jsonl"
    if not ledger.is_file():
        return None
    with open(ledger, encoding="utf-8") as file:
        first = file.readline()
    try:
        found = json.loads(first)["event"]["hash8"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
