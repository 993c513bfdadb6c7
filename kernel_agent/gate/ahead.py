"""Jobs that run beside what their result is needed for: two cores have a verdict in little more than half of the time.

Only behind walls: where one is missing, a candidate might reach what runs beside it, and jobs wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import TracebackType

from kernel_agent.sandbox import Job, Message, Report, Sandbox

_TOGETHER = 2
"""Jobs that run at once, beside the caller's own."""


class Ahead:
    """Runs jobs in threads. Leaving its `with` block ends those that still run."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._threads = ThreadPoolExecutor(_TOGETHER, "ahead")
        self._left = threading.Event()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._threads.shutdown(cancel_futures=True)

    def begin(self, job: Job, on_message: Callable[[Message], None] | None = None) -> Callable[[], Report]:
        """Begin a job, where walls keep it from others; the result waits for its report, or runs it.

        The result raises what `Sandbox.run` does.
        """
        if not self._sandbox.keeps_apart:
            return cache(lambda: self._sandbox.run(job, on_message))
        return self._threads.submit(self._sandbox.run, job, on_message, cancelled=self._left).result
