"""Embedding in a child process: importing what embeds takes seconds and a gigabyte, which the caller is spared.

The entry is run by `kernel_agent.sandbox`, of which this package imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rag.embed import embed


class _Call(Protocol):
    payload: dict[str, Any]

    def send(self, record: Mapping[str, Any]) -> None: ...


def embedded(call: _Call) -> None:
    """Payload: `text`. Sends one message with its `vector`."""
    (vector,) = embed([call.payload["text"]])
    call.send({"vector": [float(number) for number in vector]})


def readable() -> tuple[Path, ...]:
    """What the child reads besides the interpreter and what is installed with it."""
    return (Path(os.path.dirname(os.path.abspath(__file__))),)
