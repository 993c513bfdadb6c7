"""`OpenAIModel`: OpenAI through its SDK, and every server that speaks OpenAI's chat completions.

OpenAI's own servers are asked in the Responses protocol, which alone gives reasoning summaries; others (vLLM, Ollama,
llama.cpp, gateways) in chat completions, which alone they all speak. No temperature is sent: reasoning models reject
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kernel_agent.config import Backend, Effort
from kernel_agent.models import chat, responses
from kernel_agent.models.errors import (
    CutStream,
    ModelError,
    ProviderUnavailable,
    RefusedReply,
    is_policy,
    require_stream,
    said,
    status_error,
)
from kernel_agent.models.hosted import CONNECT_S, MAX_RETRIES, SILENCE_S, HostedModel, Part
from kernel_agent.models.keys import Key
from kernel_agent.models.protocol import Conversation, OnNotice, Progress, Reply, unheard
from kernel_agent.models.servers import Wire, wire_of

if TYPE_CHECKING:
    import openai


class OpenAIModel(HostedModel):
    """Asks one model; `wire` follows from the server unless given."""

    backend = Backend.OPENAI

    def __init__(
        self,
        name: str,
        key: Key,
        *,
        effort: Effort = Effort.MEDIUM,
        base_url: str | None = None,
        wire: Wire | None = None,
        on_notice: OnNotice = unheard,
        max_retries: int = MAX_RETRIES,
        silence_s: float = SILENCE_S,
    ) -> None:
        """See `HostedModel`."""
        super().__init__(
            name,
            key,
            effort=effort,
            base_url=base_url,
            on_notice=on_notice,
            max_retries=max_retries,
            silence_s=silence_s,
        )
        self._wire = wire or wire_of(base_url)

    def _stream(self, conversation: Conversation, on_text: Progress, max_output: int | None) -> Reply:
        with self._client() as client:
            if self._wire is Wire.RESPONSES:
                return self._respond(client, conversation, on_text, max_output)
            return self._chat(client, conversation, on_text, max_output)

    def _client(self) -> openai.OpenAI:
        import openai

        timeout = openai.Timeout(self._silence_s, connect=CONNECT_S)
        return openai.OpenAI(
            api_key=self._key.secret, base_url=self._url, max_retries=self._max_retries, timeout=timeout
        )

    def _respond(
        self, client: openai.OpenAI, conversation: Conversation, on_text: Progress, max_output: int | None
    ) -> Reply:
        effort = reasoning_effort(self.name, self._effort) if self._sends(Part.EFFORT) else None
        with self._opening():
            stream = responses.send(
                client,
                self.name,
                conversation,
                effort,
                summary=self._sends(Part.SUMMARY),
                cache=self._sends(Part.CACHE),
                max_output=max_output,
            )
        require_stream(stream.response.headers.get("content-type", ""), server=self._server)
        with self._reading():
            return responses.read(stream, on_text)

    def _chat(
        self, client: openai.OpenAI, conversation: Conversation, on_text: Progress, max_output: int | None
    ) -> Reply:
        effort = reasoning_effort(self.name, self._effort) if self._sends(Part.EFFORT) else None
        with self._opening():
            stream = chat.send(
                client,
                self.name,
                conversation,
                effort,
                usage=self._sends(Part.USAGE),
                max_output=max_output,
                old_limit=self._sends(Part.MAX_TOKENS),
            )
        require_stream(stream.response.headers.get("content-type", ""), server=self._server)
        with self._reading():
            return chat.read(stream, self.name, on_text)

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Until the first byte of the reply; the SDK has retried what can be retried."""
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            raise self._from_status(error) from error
        except openai.APIError as error:
            message = f"cannot reach {self._server}: {self._key.redact(error.message)}"
            raise ProviderUnavailable(message, remedy="check the network and --base-url") from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """While the reply comes in: whatever breaks here cuts it."""
        import openai

        try:
            yield
        except (openai.APIError, json.JSONDecodeError, UnicodeDecodeError) as error:
            message = self._key.redact(str(error))
            raise CutStream(f"{self._server} cut the reply: {message}", remedy="try again later") from error

    def _from_status(self, error: openai.APIStatusError) -> ModelError:
        message = self._key.redact(said(error.body))
        if error.code is not None and is_policy(error.code):
            return RefusedReply(
                f"{self._server} refused the request: {message}", remedy="ask another model with --model"
            )
        return status_error(error.status_code, message, server=self._server, key=self._key)


def reasoning_effort(model: str, effort: Effort) -> Effort | None:
    """The effort to send to a model, None for models that do not reason and reject the parameter.

    `minimal` was understood by the first gpt-5 generation alone; for all others the least effort is `low`.
    """
    if model.startswith(("gpt-3", "gpt-4", "chatgpt-")) or "-chat" in model:
        return None
    first_generation = model in {"gpt-5", "gpt-5-mini", "gpt-5-nano"} or model.startswith("gpt-5-2025")
    return Effort.LOW if effort is Effort.MINIMAL and not first_generation else effort
