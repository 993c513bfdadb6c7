"""Ends a piece of a user's code that does not end by itself, while it can still be said which line was running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 4
"""Seconds on the clock per second of processor time: a busy machine is slow, and a sleeping file is still at work."""
AGAIN = 1.0
"""Seconds until the code is told once more, should it have caught what it was told."""


class TimeUp(BaseException):
    """Raised in the line that runs when the time is over. No `Exception`: a loop that catches those must end too."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` inside of the block after `seconds` of processor time, or `PATIENCE` times that on the clock.

    Only the main thread of a process can be interrupted; in another thread the block runs without limit. A call into
    native code is interrupted when it returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(*_: Any) -> None:
        raise TimeUp

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, seconds * PATIENCE))
    before = [(which, number, signal.signal(number, tell)) for which, number, _ in timers]
    left = [signal.setitimer(which, after, AGAIN) for which, _, after in timers]
    try:
        yield
    finally:
        for (which, number, handler), (remaining, interval) in zip(before, left, strict=True):
            signal.setitimer(which, 0.0)
            signal.signal(number, handler)
            signal.setitimer(which, remaining, interval)
