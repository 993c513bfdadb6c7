"""Many pairs at a time: processes that judge, and what they answer as it comes."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.collection.worker import QUIET, Answer, Task


@dataclass(frozen=True)
class Begun:
    """A worker starts on a pair."""

    task: Task


@dataclass(frozen=True)
class Done:
    """A worker has answered."""

    task: Task
    answer: Answer


Event = Begun | Done


class Workers:
    """Judges tasks in up to `jobs` processes. Leaving the block ends them, and their sandboxes with them."""

    def __init__(self, jobs: int) -> None:
        self._jobs = max(1, jobs)
        self._processes: list[subprocess.Popen[str]] = []
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

    def run(self, tasks: Sequence[Task]) -> Iterator[Event]:
        """What happens, until every task is done. The order of answers is that in which they come."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        for _ in range(min(self._jobs, len(tasks))):
            threading.Thread(target=self._work, args=(waiting, events), daemon=True).start()
        left = len(tasks)
        while left:
            event = events.get()
            left -= isinstance(event, Done)
            yield event

    def _work(self, waiting: queue.SimpleQueue[Task], events: queue.SimpleQueue[Event]) -> None:
        process: subprocess.Popen[str] | None = None
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                if process is not None and process.stdin is not None:
                    process.stdin.close()
                return
            process = process if process is not None and process.poll() is None else self._start()
            if process is None:
                return
            events.put(Begun(task))
            events.put(Done(task, _ask(process, task)))

    def _start(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._closed:
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", "kernel_agent.collection.worker", *([QUIET] if self._processes else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                cwd=Path.cwd(),
            )
            self._processes.append(process)
            return process


def _ask(process: subprocess.Popen[str], task: Task) -> Answer:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(task.model_dump_json() + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        line = ""
    if not line:
        return Answer(problem=f"the process that judged it ended with status {process.wait()}")
    return Answer.model_validate_json(line)
