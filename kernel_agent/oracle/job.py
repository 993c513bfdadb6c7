"""Runs an entry of the truth child and turns every bad ending into an error with the words a user needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.oracle.records import TruthTooLarge, raise_again
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.sandbox import Ending, Job, Limits, Message, Report, Sandbox

LIMITS = Limits(wall_s=300.0)
"""The truth is the user's own code at sizes chosen by us; it is given more time than a candidate."""


def run_truth(
    sandbox: Sandbox,
    entry: str,
    facts: FileFacts,
    payload: dict[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    limits: Limits = LIMITS,
    on_message: Callable[[Message], None] | None = None,
    room: str = "oracle",
    cancelled: threading.Event | None = None,
) -> tuple[Message, ...]:
    """Run an entry of this or another room in a fresh process; returns its messages, and tells each one as it comes.

    Raises `InputError` for what is wrong in the user's file, `TruthError` for what the oracle cannot compute (of them
    `TruthTooLarge` for a forward that does not end), and `EnvironmentProblem` when the child ended in a way that
    neither explains.
    """
    job = Job(
        entry=f"kernel_agent.{room}.{entry}",
        payload=payload,
        tensors=tensors or {},
        limits=limits,
        label=f"truth of {facts.path.name}",
    )
    report = sandbox.run(job, on_message, cancelled=cancelled)
    for message in report.messages:
        if "error" in message.record:
            raise_again(message.record["error"])
    if report.ending is not Ending.FINISHED:
        raise _ended(report, facts, limits)
    return report.messages


def _ended(report: Report, facts: FileFacts, limits: Limits) -> Exception:
    if report.ending is Ending.TIMED_OUT:
        return TruthTooLarge(
            f"{facts.path}: the forward does not finish within {limits.wall_s:.0f} s in the exact executor",
            remedy="Look for a loop in it that never ends; if it has none, give SWEEP a smaller required entry.",
        )
    if report.ending is Ending.OUT_OF_MEMORY:
        return TruthTooLarge(
            f"{facts.path}: the forward needs more than {limits.memory_bytes >> 30} GiB in the exact executor",
            remedy="Give SWEEP a smaller required entry.",
        )
    if report.ending in (Ending.EXITED, Ending.SIGNALLED):
        return InputError(
            f"the file ends the process that runs it: {report.message}",
            remedy="A forward must return; os._exit and crashes in native code cannot be followed.",
            path=facts.path,
        )
    said = f"{report.error.type}: {report.error.message}" if report.error else report.message
    return EnvironmentProblem(f"the truth child failed: {said}", remedy="Run `kernel-agent doctor`.")
