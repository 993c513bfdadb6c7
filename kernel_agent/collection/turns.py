"""Turns on one GPU: processes that prepare pairs use it side by side, one that times uses it alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Locks on two files of a folder that all processes share; they are free again when a process dies."""

    def __init__(self, folder: Path) -> None:
        self._gate = os.open(folder / "gate", os.O_CREAT | os.O_RDWR, 0o600)
        self._room = os.open(folder / "room", os.O_CREAT | os.O_RDWR, 0o600)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Use the GPU while others may, too."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the GPU while nobody else does."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        fcntl.flock(self._gate, fcntl.LOCK_EX)  # who wants to be alone keeps further ones from entering before it
        try:
            fcntl.flock(self._room, kind)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)
