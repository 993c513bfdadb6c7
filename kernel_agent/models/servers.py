"""Which server is asked, and in which protocol."""

from __future__ import annotations

import enum
from urllib.parse import urlsplit

from kernel_agent.config import Backend

OFFICIAL_URLS = {Backend.OPENAI: "https://api.openai.com/v1", Backend.ANTHROPIC: "https://api.anthropic.com"}


class Wire(str, enum.Enum):
    """A protocol that OpenAI-compatible servers speak."""

    RESPONSES = "responses"
    CHAT_COMPLETIONS = "chat completions"


def host_of(url: str) -> str:
    """Host and port, for messages: a URL may carry a password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


def is_official(backend: Backend, base_url: str | None) -> bool:
    """True for the provider's own servers: none named, `api.openai.com`, or a regional `eu.api.openai.com`."""
    official = urlsplit(OFFICIAL_URLS[backend]).hostname or ""
    host = urlsplit(base_url or OFFICIAL_URLS[backend]).hostname or ""
    return host == official or host.endswith("." + official)


def wire_of(base_url: str | None) -> Wire:
    """Responses for OpenAI's own servers, chat completions for every other: the one protocol that all of them speak."""
    return Wire.RESPONSES if is_official(Backend.OPENAI, base_url) else Wire.CHAT_COMPLETIONS
