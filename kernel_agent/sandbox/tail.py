"""The end of an endless text: what is kept of a child's stdout and stderr."""

from __future__ import annotations


class Tail:
    """Keeps the last `limit` bytes of what is added."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._cut = False

    def add(self, data: bytes) -> None:
        """Append; drops from the front."""
        self._kept += data
        surplus = len(self._kept) - self._limit
        if surplus > 0:
            del self._kept[:surplus]
            self._cut = True

    def text(self) -> str:
        """As text, with undecodable bytes replaced and a mark where the front was dropped."""
        text = bytes(self._kept).decode(errors="replace")
        return f"[...]{text}" if self._cut else text
