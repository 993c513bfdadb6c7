"""Embedding in a child process: importing what embeds takes seconds and a gigabyte, which the caller is spared.

The entry is run by `kernel_agent.sandbox`, of which this package imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rag.embed_folder import model_files
from rag.embedders import embed_with
from rag.embedding import Embedding


class _Call(Protocol):
    payload: dict[str, Any]

    def send(self, record: Mapping[str, Any]) -> None: ...


def embedded(call: _Call) -> None:
    """Payload: `text`, and `embedding` as a record of `Embedding`. Sends one message with its `vector`."""
    (vector,) = embed_with(Embedding.model_validate(call.payload["embedding"]), [call.payload["text"]])
    call.send({"vector": [float(number) for number in vector]})


def readable(embedding: Embedding) -> tuple[Path, ...]:
    """What the child reads besides the interpreter and what is installed with it: this package, and a local model."""
    package = Path(os.path.dirname(os.path.abspath(__file__)))
    if embedding.bundled or embedding.remote:
        return (package,)
    folder = Path(embedding.model)
    # Files of a model cache are links to another folder.
    return (package, folder, *sorted({path.resolve().parent for path in model_files(folder)} - {folder}))
