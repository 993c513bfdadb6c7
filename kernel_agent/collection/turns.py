"""Turns on a GPU that processes share: one that times stops the others meanwhile, few compute exact gradients at once.

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

    Whoever makes one is stopped while another process times. A process that dies while it times leaves the others
    stopped: who started them must send SIGCONT then.
    """

    def __init__(self, folder: Path, proofs: int = 1) -> None:
        """`proofs`: how many processes may compute exact gradients at a time, as memory allows."""
        self._folder = folder
        self._clock = os.open(folder / "clock", os.O_CREAT | os.O_RDWR, 0o600)
        self._places = [os.open(folder / f"proof{n}", os.O_CREAT | os.O_RDWR, 0o600) for n in range(max(1, proofs))]
        (folder / f"{os.getpid()}.pid").touch()

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
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return place
            time.sleep(_PATIENCE_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)
