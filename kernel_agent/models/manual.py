"""`ManualModel`: whoever writes files is the model. An ask is a file, and so is the reply.

Any chat window, coding agent or person can answer; see `kernel_agent.models.exchange` for the files.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from kernel_agent.errors import WaitingForReply
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.protocol import Conversation, Notice, NoticeKind, OnNotice, Progress, Reply, Usage, unheard
from kernel_agent.models.usage import estimated_usage

POLL_S = 0.25
SETTLE_S = 0.5


class ManualModel:
    """Writes `asks/0001.md` and takes `replies/0001.md` once it has text and has stopped growing."""

    limit: int | None = None

    def __init__(
        self,
        run: Path,
        *,
        name: str = "manual",
        wait: bool = True,
        on_notice: OnNotice = unheard,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`settle_s`: seconds a reply's file must stay as it is, as editors and agents write in pieces."""
        self.name = name
        self._run = run
        self._exchange = Exchange(run)
        self._wait = wait
        self._taken = 0
        self._on_notice = on_notice
        self._poll_s = poll_s
        self._settle_s = settle_s

    def ask(
        self,
        conversation: Conversation,
        *,
        number: int | None = None,
        on_text: Progress | None = None,
        max_output: int | None = None,  # noqa: ARG002 - what is written already, or by a person, is not cut
    ) -> Reply:
        """The reply to an ask.

        Raises `WaitingForReply` when there is none yet and the model was made with `wait=False`.
        """
        started = time.monotonic()
        number = number or max(self._taken, self._exchange.received()) + 1
        notices = self._put(number, conversation)
        self._await_reply(number)
        reply = self._exchange.read_reply(number, model=self.name)
        self._taken = number
        if on_text is not None:
            on_text(reply.text)
        latency = reply.latency_s or time.monotonic() - started
        usage = estimated_usage(conversation, reply) if reply.usage == Usage() else reply.usage
        return reply.model_copy(update={"latency_s": latency, "usage": usage, "notices": notices})

    def _put(self, number: int, conversation: Conversation) -> tuple[Notice, ...]:
        """Write the ask. One that was answered stays as it was, for it is what the reply answers."""
        if self._exchange.same_ask(number, conversation):
            return ()
        if not (self._exchange.has_ask(number) and self._exchange.has_reply(number)):
            self._exchange.write_ask(number, conversation)
            return ()
        text = f"asks/{number:04d}.md has changed since its reply was written"
        notice = Notice(kind=NoticeKind.ASK_CHANGED, text=text)
        self._on_notice(notice)
        return (notice,)

    def _await_reply(self, number: int) -> None:
        ask, path = self._exchange.ask_path(number), self._exchange.reply_path(number)
        told = False
        while not (self._exchange.has_reply(number) and self._is_still(path)):
            if not self._wait:
                resume = f"kernel-agent resume {shlex.quote(str(self._run))}"
                # The message goes into the ledger, which holds no path of this machine.
                raise WaitingForReply(
                    f"{ask.relative_to(self._run)} waits for a reply",
                    remedy=f"read {ask}, write the reply to {path}, then run: {resume}",
                )
            if not told:
                self._on_notice(Notice(kind=NoticeKind.WAITING, text=f"{ask} waits for a reply in {path}"))
                told = True
            time.sleep(self._poll_s)

    def _is_still(self, path: Path) -> bool:
        before = path.stat()
        time.sleep(self._settle_s)
        after = path.stat()
        return (before.st_size, before.st_mtime_ns, before.st_ino) == (after.st_size, after.st_mtime_ns, after.st_ino)
