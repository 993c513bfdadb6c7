"""Turns on a GPU that processes share: one that times stops the others, few prove at once, one may ask for all memory.

Processes that wait for one another would not do: an exact gradient takes a minute, a compiler that runs what it has
compiled asks nobody, and each clock would wait for all of them. A stopped process gives the GPU no work at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
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
        self._waited = 0.0
        (folder / f"{os.getpid()}.pid").touch()

    def _file(self, name: str) -> int:
        return os.open(self._folder / name, os.O_CREAT | os.O_RDWR, 0o600)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the GPU while nobody else does."""
        with self._waiting():
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
        with self._waiting(), _locked(self._door, fcntl.LOCK_EX):  # who waits in the door keeps all others out
            fcntl.flock(self._memory, kind)
        try:
            yield
        finally:
            fcntl.flock(self._memory, fcntl.LOCK_UN)

    @contextmanager
    def proof(self) -> Iterator[None]:
        """Hold one of the places for those who compute exact gradients."""
        with self._waiting():
            place = self._free_place()
        try:
            yield
        finally:
            fcntl.flock(place, fcntl.LOCK_UN)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """What passes in this block counts as time that others took: see `waited`."""
        start = time.monotonic()
        self._tell(start)
        try:
            yield
        finally:
            self._waited += time.monotonic() - start
            self._tell(None)

    def _tell(self, since: float | None) -> None:
        written = self._folder / f"{os.getpid()}.writing"
        written.write_text(json.dumps([self._waited, since]), encoding="utf-8")
        os.replace(written, _ledger(self._folder, os.getpid()))

    def _free_place(self) -> int:
        while True:
            for place in self._places:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return place
            time.sleep(_PATIENCE_S)


def waited(folder: Path, pid: int) -> float:
    """Seconds that a process has waited for its turns up to now."""
    ledger = _ledger(folder, pid)
    if not ledger.is_file():
        return 0.0
    total, since = json.loads(ledger.read_text(encoding="utf-8"))
    return float(total if since is None else total + time.monotonic() - since)


def _ledger(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.waited"


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
