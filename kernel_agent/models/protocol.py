"""`Model`: a conversation in, a `Reply` out. The loop knows nothing else of where replies come from."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from pydantic import Field, field_validator

from kernel_agent.record import Record


class Role(str, enum.Enum):
    """Who speaks."""

    USER = "user"
    ASSISTANT = "assistant"


class Turn(Record):
    """One message."""

    role: Role
    text: str


class Conversation(Record):
    """What a model is asked. `system` and the first turn are the stable prefix that providers cache."""

    system: str
    turns: tuple[Turn, ...]


class StopReason(str, enum.Enum):
    """Why a reply ended."""

    COMPLETE = "complete"
    LENGTH = "length"
    REFUSAL = "refusal"


class UsageKind(str, enum.Enum):
    """Who counted tokens."""

    REPORTED = "reported"
    """The provider, as it bills them."""
    ESTIMATED = "estimated"
    """This package, from the texts: nobody reports any."""


class Usage(Record):
    """Tokens of one reply. `input` includes those read from and written to a cache, `output` the reasoning ones."""

    kind: UsageKind = UsageKind.REPORTED

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    cache_written: int = Field(
        default=0, description="of `input`: stored in the provider's cache, which some bill apart"
    )


class NoticeKind(str, enum.Enum):
    """What a model has to say beside its reply."""

    WAITING = "waiting"
    ASK_CHANGED = "ask changed"
    STREAM_CUT = "stream cut"
    REQUEST_SIMPLIFIED = "request simplified"
    USAGE_ESTIMATED = "usage estimated"


class Notice(Record):
    """One remark for the person who watches. Not an error: the reply comes, or is still awaited."""

    kind: NoticeKind
    text: str = Field(description="one line")


class Reply(Record):
    """One answer with all that is known about its making."""

    text: str
    reasoning: str | None = Field(default=None, description="the provider's reasoning summary, if any")
    usage: Usage = Usage()
    cost_usd: float | None = Field(default=None, description="None when the price of the model is unknown")
    latency_s: float = 0.0
    model: str
    stop: StopReason = StopReason.COMPLETE
    notices: tuple[Notice, ...] = Field(default=(), description="what happened on the way, except waiting")

    @field_validator("text", "reasoning")
    @classmethod
    def _writable(cls, text: str | None) -> str | None:
        """JSON can name halves of characters, which no file takes: pairs are joined, others become U+FFFD."""
        if text is None or text.isascii():
            return text
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


Progress = Callable[[str], None]
"""Receives pieces of streamed text as they arrive."""

OnNotice = Callable[[Notice], None]
"""Receives notices the moment they arise."""


def unheard(notice: Notice) -> None:
    """The `OnNotice` of a caller who reads `Reply.notices` afterwards."""


class Model(Protocol):
    """A source of replies."""

    name: str

    @property
    def limit(self) -> int | None:
        """Asks that it can answer in a run; None: as many as there are."""
        ...

    def ask(
        self,
        conversation: Conversation,
        *,
        number: int | None = None,
        on_text: Progress | None = None,
        max_output: int | None = None,
    ) -> Reply:
        """Answer a conversation; several threads may ask at once, each with another `number`.

        `number`: which ask of the run it is, counted from 1; None: the one after those that the run has taken.
        `max_output`: tokens, reasoning included, at which a hosted reply is cut off; None: as many as it takes.
        Raises `ModelError` when no reply can be had.
        """
        ...
