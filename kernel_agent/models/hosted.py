"""`HostedModel`: what models behind an SDK have in common.

Statuses 408, 409, 429 and 5xx and failed connections are retried by the SDK, with backoff and `Retry-After`. Here is
what no SDK does: a stream that is cut is asked for once more, and a request that a server finds too modern is sent
again without the part it names.
"""

from __future__ import annotations

import abc
import enum
import time

from kernel_agent.config import Backend, Effort
from kernel_agent.models.errors import CutStream, RequestRejected
from kernel_agent.models.keys import Key
from kernel_agent.models.prices import cost_of
from kernel_agent.models.protocol import Conversation, Notice, NoticeKind, OnNotice, Progress, Reply, Usage, unheard
from kernel_agent.models.servers import OFFICIAL_URLS, host_of
from kernel_agent.models.usage import estimated_usage

MAX_RETRIES = 4
CONNECT_S = 10.0
SILENCE_S = 600.0
"""Longest wait for the next piece of a stream: reasoning models are silent for minutes."""


class Part(enum.Enum):
    """A part of a request that not every server or model knows, with words that its complaint would hold."""

    SUMMARY = ("summar",)
    USAGE = ("stream_options", "include_usage")
    CACHE = ("cache_control", "prompt_cache")
    EFFORT = ("reasoning", "effort", "thinking", "output_config")
    MAX_TOKENS = ("use 'max_completion_tokens'",)
    """The name of the limit on a reply that all servers but some gateways know."""


class HostedModel(abc.ABC):
    """A model that is asked over the network."""

    backend: Backend
    limit: int | None = None

    def __init__(
        self,
        name: str,
        key: Key,
        *,
        effort: Effort = Effort.MEDIUM,
        base_url: str | None = None,
        on_notice: OnNotice = unheard,
        max_retries: int = MAX_RETRIES,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`base_url`: another server than the provider's own. `max_retries`: of the SDK, per request."""
        self.name = name
        self._key = key
        self._effort = effort
        self._url = base_url or OFFICIAL_URLS[self.backend]
        self._server = host_of(self._url)
        self._on_notice = on_notice
        self._max_retries = max_retries
        self._silence_s = silence_s
        self._dropped: set[Part] = set()

    def ask(
        self,
        conversation: Conversation,
        *,
        number: int | None = None,
        on_text: Progress | None = None,
        max_output: int | None = None,
    ) -> Reply:
        """Answer a conversation, whichever it is of the run.

        Raises the subclasses of `ModelError` that `kernel_agent.models.errors` lists.
        """
        del number  # the provider need not know
        started = time.monotonic()
        notices: list[Notice] = []
        reply = self._insist(conversation, on_text or _silence, notices, max_output)
        usage = reply.usage
        if usage == Usage():
            usage = estimated_usage(conversation, reply)
            self._tell(
                notices, NoticeKind.USAGE_ESTIMATED, f"{self._server} reports no token counts; they are estimated"
            )
        cost = cost_of(reply.model, usage)
        if cost is None:
            # Gateways report names of their own.
            cost = cost_of(self.name, usage)
        took = time.monotonic() - started
        return reply.model_copy(update={"usage": usage, "cost_usd": cost, "latency_s": took, "notices": tuple(notices)})

    @abc.abstractmethod
    def _stream(self, conversation: Conversation, on_text: Progress, max_output: int | None) -> Reply:
        """One request, without cost and latency. Raises `ModelError`."""

    def _insist(
        self, conversation: Conversation, on_text: Progress, notices: list[Notice], max_output: int | None
    ) -> Reply:
        cut = False
        while True:
            try:
                return self._stream(conversation, on_text, max_output)
            except CutStream as error:
                if cut:
                    raise
                cut = True
                self._tell(notices, NoticeKind.STREAM_CUT, f"{error.message}; the ask is sent once more")
            except RequestRejected as error:
                part = self._blamed(error)
                if part is None:
                    raise
                self._dropped.add(part)
                self._tell(
                    notices, NoticeKind.REQUEST_SIMPLIFIED, f"{error.message}; sent again without {part.name.lower()}"
                )

    def _blamed(self, error: RequestRejected) -> Part | None:
        """The part that the server complains about, unless it was left out already."""
        complaint = error.message.lower()
        left = (part for part in Part if part not in self._dropped) if error.status in {400, 422} else ()
        return next((part for part in left if any(word in complaint for word in part.value)), None)

    def _sends(self, part: Part) -> bool:
        return part not in self._dropped

    def _tell(self, notices: list[Notice], kind: NoticeKind, text: str) -> None:
        notice = Notice(kind=kind, text=" ".join(text.split()))
        notices.append(notice)
        self._on_notice(notice)


def _silence(text: str) -> None:
    """Progress that nobody watches."""
