"""Turns on a GPU that processes share: one that times stops the others, few prove at once, one may ask for all memory.

Processes that wait for one another would not do: an exact gradient takes a minute, a compiler that runs what it has
compiled asks nobody, and each clock would wait for all of them. A stopped process gives the GPU no work at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SETTLE_S = 0.1
"""What stopped processes gave the GPU is done by then."""
_PATIENCE_S = 0.02
"""Between two looks for a free place."""


class Turns:
    """Locks on files of a folder that all processes share; they are free again when a process dies.

    They are taken in one order, so that nobody waits in a circle: memory, then a place for a proof, then the clock.
    Whoever makes one is stopped while another process times. A process that dies while it times leaves the others
    stopped: who started them must send SIGCONT then.
    """

    def __init__(self, folder: Path, proofs: int = 1) -> None:
        """`proofs`: how many processes may compute exact gradients at a time, as memory allows."""
        self._folder = folder
        self._clock = self._file("clock")
        self._door = self._file("door")
        self._memory = self._file("memory")
        self._places = [self._file(f"proof{number}") for number in range(max(1, proofs))]
        (folder / f"{os.getpid()}.pid").touch()

    def _file(self, name: str) -> int:
        return os.open(self._folder / name, os.O_CREAT | os.O_RDWR, 0o600)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the GPU while nobody else does."""
        fcntl.flock(self._clock, fcntl.LOCK_EX)
        others = self._others()
        try:
            for pid in others:
                _signal(pid, signal.SIGSTOP)
            time.sleep(SETTLE_S if others else 0.0)
            yield
        finally:
            for pid in others:
                _signal(pid, signal.SIGCONT)
            fcntl.flock(self._clock, fcntl.LOCK_UN)

    def _others(self) -> list[int]:
        return [pid for pid in (int(path.stem) for path in self._folder.glob("*.pid")) if pid != os.getpid()]

    def some_memory(self) -> contextlib.AbstractContextManager[None]:
        """Hold memory of the GPU beside others. Whoever is in this block must hold none when leaving it."""
        return self._hold_memory(fcntl.LOCK_SH)

    def all_memory(self) -> contextlib.AbstractContextManager[None]:
        """Hold memory while nobody else does. Not within `some_memory`: two who wait for each other would wait forever.

        Nobody begins to hold memory while one waits for this; else it would never come about.
        """
        return self._hold_memory(fcntl.LOCK_EX)

    @contextmanager
    def _hold_memory(self, kind: int) -> Iterator[None]:
        with _locked(self._door, fcntl.LOCK_EX):  # who waits in the door keeps all others out
            fcntl.flock(self._memory, kind)
        try:
            yield
        finally:
            fcntl.flock(self._memory, fcntl.LOCK_UN)

    @contextmanager
    def proof(self) -> Iterator[None]:
        """Hold one of the places for those who compute exact gradients."""
        place = self._free_place()
        try:
            yield
        finally:
            fcntl.flock(place, fcntl.LOCK_UN)

    def _free_place(self) -> int:
        while True:
            for place in self._places:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return place
            time.sleep(_PATIENCE_S)


@contextmanager
def _locked(file: int, kind: int) -> Iterator[None]:
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)
