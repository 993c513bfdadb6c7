"""Many pairs at a time: processes that take a task a line and answer a line, and what they say as it comes."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kernel_agent.collection.worker import Task

_GONE_S = 10.0
"""Seconds within which a thread notices that its process has ended."""


@dataclass(frozen=True)
class Begun:
    """A worker starts on a pair."""

    task: Task


@dataclass(frozen=True)
class Done:
    """A worker is through with a pair."""

    task: Task
    line: str
    """Its answer; empty when the process ended without one."""
    timed_out: bool = False
    """It was ended, since it took too long."""

    @property
    def is_last(self) -> bool:
        """Whether the process says with `last` in its answer that it takes no other task: it ends soon."""
        return bool(self.line) and bool(json.loads(self.line).get("last"))

    @property
    def why(self) -> str:
        """Why there is no answer."""
        return "it took too long" if self.timed_out else "the process at work on it ended"


Event = Begun | Done


class Workers:
    """Works on tasks in up to `jobs` processes. Leaving the block ends them, and their sandboxes with them."""

    def __init__(
        self,
        command: Sequence[str],
        jobs: int,
        limit_s: float | None = None,
        waited: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        """`command`: what a process is started with; its number follows. `limit_s`: seconds for one task, of which
        those do not count that a process, by its id, has `waited` for others."""
        self._command = list(command)
        self._jobs = max(1, jobs)
        self._limit_s = limit_s
        self._waited = waited
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()  # the sandbox's server ends when its parent is gone
            process.wait()
        for thread in self._threads:
            thread.join(_GONE_S)
        for process in processes:
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()

    def run(self, tasks: Sequence[Task], deadline: float | None = None) -> Iterator[Event]:
        """What happens, until every task is done, in the order in which it does; nothing after `deadline`
        (`time.monotonic`), whatever is still at work then."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        for number in range(min(self._jobs, len(tasks))):
            thread = threading.Thread(target=self._work, args=(number, waiting, events), daemon=True)
            self._threads.append(thread)
            thread.start()
        left = len(tasks)
        while left:
            try:
                event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            left -= isinstance(event, Done)
            yield event

    def _work(self, number: int, waiting: queue.SimpleQueue[Task], events: queue.SimpleQueue[Event]) -> None:
        process: subprocess.Popen[str] | None = None
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                if process is not None and process.stdin is not None:
                    process.stdin.close()
                return
            process = process if process is not None and process.poll() is None else self._start(number)
            if process is None:
                return
            events.put(Begun(task))
            done = self._ask(process, task)
            if done.is_last:
                process = None
            events.put(done)

    def _start(self, number: int) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._closed:
                return None
            process = subprocess.Popen(
                [*self._command, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
            self._processes.append(process)
            return process

    def _ask(self, process: subprocess.Popen[str], task: Task) -> Done:
        assert process.stdin is not None
        assert process.stdout is not None
        late, through = threading.Event(), threading.Event()
        if self._limit_s is not None:
            threading.Thread(target=self._watch, args=(process, self._limit_s, late, through), daemon=True).start()
        try:
            process.stdin.write(task.model_dump_json() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it has ended
            line = ""
        finally:
            through.set()
        if not line:
            process.kill()
            process.wait()
            self._wake()
        return Done(task, line, late.is_set() and not line)

    def _watch(
        self, process: subprocess.Popen[str], limit_s: float, late: threading.Event, through: threading.Event
    ) -> None:
        """End a process that is not through with its task in time."""
        end = time.monotonic() + limit_s - self._waited(process.pid)
        while (left := end + self._waited(process.pid) - time.monotonic()) > 0:
            if through.wait(left):
                return
        late.set()
        process.kill()

    def _wake(self) -> None:
        """A process that ended may have had others stopped: see `Turns`."""
        with self._lock:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
