"""Replies: waiting for those to the open asks, several at once, and keeping each the moment it is there.

A reply is on disk before anything else happens, so that a run that is killed neither asks nor pays for it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread

from kernel_agent.agent import events as ev
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.state import Round
from kernel_agent.config import Backend
from kernel_agent.errors import WaitingForReply
from kernel_agent.models.protocol import Progress, Reply

NO_TEXT = "(The reply held no text.)"
"""Stands for an empty reply, so that its file shows that it was received."""


def receive(desk: Desk) -> None:
    """Get and record the replies to all open asks. What was received is recorded even if another one cannot be had."""
    waiting = [asked for asked in desk.state.open if asked.reply is None]
    if len(waiting) == 1:
        reply = fetch(desk, waiting[0], desk.observer.on_text)
        desk.record(ev.Replied(number=waiting[0].number, reply=reply))
    elif waiting:
        _receive_all(desk, waiting)


def fetch(desk: Desk, asked: Round, on_text: Progress | None) -> Reply:
    """The reply to one ask, and its files; one that lies there already was received before the run was killed."""
    number = asked.number
    facts = desk.exchange.facts_path(number).is_file()
    # Where a person writes the replies, a text without facts may still be growing.
    if desk.exchange.has_reply(number) and (facts or desk.config.backend is not Backend.MANUAL):
        reply = desk.exchange.read_reply(number, model=desk.model.name)
        if not facts:
            desk.exchange.write_reply(number, reply)
        return reply
    limit = desk.budget.output_limit(desk.state, asked.estimated_input)
    reply = desk.model.ask(asked.conversation, number=number, on_text=on_text, max_output=limit)
    reply = reply if reply.text.strip() else reply.model_copy(update={"text": NO_TEXT})
    desk.exchange.write_reply(number, reply)
    return reply


class _Fetching(Thread):
    """One ask on its way."""

    def __init__(self, desk: Desk, asked: Round, given_up: Event) -> None:
        # A daemon: a run that is interrupted does not wait for replies that nobody will write.
        super().__init__(name=f"ask {asked.number}", daemon=True)
        self.asked = asked
        self.reply: Reply | None = None
        self.error: BaseException | None = None
        self._desk = desk
        self._given_up = given_up

    def run(self) -> None:
        try:
            reply = fetch(self._desk, self.asked, None)
        except BaseException as error:
            self.error = error
        else:
            self.reply = None if self._given_up.is_set() else reply


def _receive_all(desk: Desk, waiting: Sequence[Round]) -> None:
    """In order of the asks, so that the ledger does not depend on which reply was the fastest."""
    given_up = Event()
    fetching = [_Fetching(desk, asked, given_up) for asked in waiting]
    for one in fetching:
        one.start()
    try:
        for one in fetching:
            one.join()
            if one.reply is not None:
                desk.record(ev.Replied(number=one.asked.number, reply=one.reply))
    finally:
        given_up.set()
    errors = [one.error for one in fetching if one.error is not None]
    absent = [one.asked.number for one in fetching if isinstance(one.error, WaitingForReply)]
    for error in errors:
        if not isinstance(error, WaitingForReply):
            raise error
    if len(absent) > 1:
        raise _waiting(desk, absent)
    if errors:
        raise errors[0]


def _waiting(desk: Desk, numbers: Sequence[int]) -> WaitingForReply:
    run = desk.folder.path
    names = [f"{number:04d}.md" for number in numbers]
    listed = ", ".join(names[:-1]) + " and " + names[-1]
    return WaitingForReply(
        f"asks/{listed} wait for replies",
        remedy=f"read them in {run / 'asks'}, write the replies under the same names to {run / 'replies'}, "
        f"then run: {desk.folder.resume_command}",
    )
