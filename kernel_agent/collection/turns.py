"""Turns on GPUs that processes share: one that times uses its GPU alone, few compute exact gradients at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE_S = 0.05
"""Between two looks for a free place."""


class Turns:
    """Locks on files of a folder that all processes share; they are free again when a process dies."""

    def __init__(self, folder: Path, proofs: int = 1) -> None:
        """`proofs`: how many processes may compute exact gradients at a time, as memory allows."""
        self._gate = os.open(folder / "gate", os.O_CREAT | os.O_RDWR, 0o600)
        self._room = os.open(folder / "room", os.O_CREAT | os.O_RDWR, 0o600)
        self._places = [os.open(folder / f"proof{n}", os.O_CREAT | os.O_RDWR, 0o600) for n in range(max(1, proofs))]

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
    def proof(self) -> Iterator[None]:
        """Hold one of the places for those who compute exact gradients."""
        place = self._free_place()
        try:
            yield
        finally:
            fcntl.flock(place, fcntl.LOCK_UN)

    @contextmanager
    def all_proofs(self) -> Iterator[None]:
        """Hold all of them: for what needs the memory of the whole GPU."""
        held = []
        try:
            for place in self._places:  # always in this order, so that two who want all do not wait for one another
                fcntl.flock(place, fcntl.LOCK_EX)
                held.append(place)
            yield
        finally:
            for place in held:
                fcntl.flock(place, fcntl.LOCK_UN)

    def _free_place(self) -> int:
        while True:
            for place in self._places:
                try:
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                return place
            time.sleep(_PATIENCE_S)

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
