"""Text files that are there whole or not at all, even after a kill or a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write UTF-8 text beside its place, flush it to the disk, and move it there; the folder is made when needed."""
    data = text.encode("utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def write_once(path: Path, text: str) -> Path:
    """As `write_whole`, but a file that exists is left as it is."""
    return path if path.exists() else write_whole(path, text)
