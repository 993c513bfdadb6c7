"""A process that judges pairs with a sandbox of its own: a task a line in, an answer a line out."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TextIO

from pydantic import Field

from kernel_agent.collection.verdicts import PairVerdict
from kernel_agent.record import Record


class Task(Record):
    """What a worker is asked."""

    path: Path
    quick: bool = False


class Answer(Record):
    """What it answers: a verdict, or why there is none."""

    verdict: PairVerdict | None = None
    problem: str = Field(default="", description="why the pair was not judged")
    seconds: float = Field(default=0.0, description="processor time of this answer, children included")


COMMAND = (sys.executable, "-m", "kernel_agent.collection.worker")
"""What `Workers` start; the number of the worker follows."""


def main() -> None:
    """Answer until the input ends. The parent alone hears of Ctrl-C, and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[-1] != "0":  # one warning of missing walls is enough
        logging.getLogger("kernel_agent.sandbox").setLevel(logging.ERROR)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints does not answer
    from kernel_agent.collection.proof import CHILDREN
    from kernel_agent.sandbox import Sandbox

    with Sandbox(CHILDREN) as sandbox:
        for line in sys.stdin:
            _reply(answers, _answered(Task.model_validate_json(line), sandbox))


def _reply(answers: TextIO, answer: Answer) -> None:
    answers.write(answer.model_dump_json() + "\n")
    answers.flush()


def _answered(task: Task, sandbox: object) -> Answer:
    from kernel_agent.collection.proof import judge
    from kernel_agent.errors import KernelAgentError, file_problem
    from kernel_agent.sandbox import Sandbox

    assert isinstance(sandbox, Sandbox)
    before = _processor_seconds(sandbox.server_pid)
    try:
        verdict = judge(task.path, sandbox, quick=task.quick)
    except KernelAgentError as error:
        return Answer(problem=" ".join(str(error).split()))
    except OSError as error:
        return Answer(problem=file_problem(error).message)
    return Answer(verdict=verdict, seconds=_processor_seconds(sandbox.server_pid) - before)


def _processor_seconds(server: int | None) -> float:
    """Of this process and the fork server with all that it has buried."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    stat = Path(f"/proc/{server}/stat")
    if server is not None and stat.is_file():
        fields = stat.read_text().rpartition(")")[2].split()  # utime, stime, cutime and cstime are fields 14 to 17
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


if __name__ == "__main__":
    main()
