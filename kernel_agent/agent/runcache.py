"""`RunCache`: what was computed once for a run, by content, so that a run that goes on need not compute it again.

It holds nothing that the ledger needs: without it a run goes on as well, only later. What is read from it is validated
by whoever reads it, as a run folder may come from elsewhere.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kernel_agent.wholefile import write_whole


class RunCache:
    """Texts by the content they were made from, in the run folder; without a folder, in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._texts: dict[str, str] = {}

    def get(self, kind: str, *content: str) -> str | None:
        """What was put under this kind and content; None when nothing was, or it cannot be read."""
        name = _name(kind, content)
        if name in self._texts or self._folder is None:
            return self._texts.get(name)
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # it is computed again
            return None

    def put(self, text: str, kind: str, *content: str) -> None:
        """Keep a text, in the folder as well where there is one."""
        name = _name(kind, content)
        self._texts[name] = text
        if self._folder is not None and self._folder.parent.is_dir():
            write_whole(self._folder / name, text)


def _name(kind: str, content: tuple[str, ...]) -> str:
    digest = hashlib.sha256("\0".join(content).encode()).hexdigest()
    return f"{kind}-{digest[:16]}.json"
