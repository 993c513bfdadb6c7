"""Turns on GPUs that processes share: one that times uses its GPU alone, few compute exact gradients at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHIFT_S = 15.0
"""On the clock: for so long proofs may begin, then for so long times go first, and so on."""
_PATIENCE_S = 0.02
"""Between two looks for a free place."""


class Turns:
    """Locks on files of a folder that all processes share; they are free again when a process dies.

    On one GPU proofs and times take shifts. If times simply waited for the proofs at work, one slow proof would hold
    every clock; if they went first, nothing would be proven while anything waits to be timed.
    """

    def __init__(self, folder: Path, proofs: int = 1, shift_s: float = SHIFT_S) -> None:
        """`proofs`: how many processes may compute exact gradients at a time, as memory allows."""
        self._room = os.open(folder / "room", os.O_CREAT | os.O_RDWR, 0o600)
        self._waiting = os.open(folder / "waiting", os.O_CREAT | os.O_RDWR, 0o600)
        self._places = [os.open(folder / f"proof{n}", os.O_CREAT | os.O_RDWR, 0o600) for n in range(max(1, proofs))]
        self._shift_s = shift_s

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Use the GPU while others may, too; in the shift of times only while none waits."""
        while not ((self._proofs_shift() or self._nobody_waits()) and _taken(self._room, fcntl.LOCK_SH)):
            time.sleep(_PATIENCE_S)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the GPU while nobody else does."""
        fcntl.flock(self._waiting, fcntl.LOCK_SH)
        try:
            while not _taken(self._room, fcntl.LOCK_EX):
                time.sleep(_PATIENCE_S)
            try:
                yield
            finally:
                fcntl.flock(self._room, fcntl.LOCK_UN)
        finally:
            fcntl.flock(self._waiting, fcntl.LOCK_UN)

    def _proofs_shift(self) -> bool:
        return time.time() % (2 * self._shift_s) < self._shift_s

    def _nobody_waits(self) -> bool:
        """Whether nobody times or wants to."""
        if not _taken(self._waiting, fcntl.LOCK_EX):
            return False
        fcntl.flock(self._waiting, fcntl.LOCK_UN)
        return True

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
                if _taken(place, fcntl.LOCK_EX):
                    return place
            time.sleep(_PATIENCE_S)


def _taken(file: int, kind: int) -> bool:
    """Lock a file if that is possible at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
