"""Turns what was seen of a job into its typed ending. The rules stand here alone, in order of precedence."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from kernel_agent.sandbox.frames import FrameKind
from kernel_agent.sandbox.job import ChildError, Ending, Limits
from kernel_agent.sandbox.warden import Aftermath, Cut


@dataclass(frozen=True)
class Evidence:
    """All that the parent knows when a job is over."""

    limits: Limits
    last_word: FrameKind | None
    """FINISHED or RAISED when the runtime came to say so."""
    error: ChildError | None
    protocol_error: str | None
    """What was wrong with the bytes the child sent; the parent then cancelled it."""
    aftermath: Aftermath | None
    """None when the warden died without a word."""


def judge(evidence: Evidence) -> tuple[Ending, str]:
    """The ending and one sentence for people."""
    after = evidence.aftermath
    if evidence.protocol_error is not None:
        return Ending.PROTOCOL, evidence.protocol_error
    if after is None:
        return Ending.EXITED, "the process that guarded the child was killed, and the child with it"
    if after.cut is not None:
        return Ending(after.cut.value), _sentence_of_cut(after.cut, evidence.limits)
    if evidence.last_word is FrameKind.RAISED and evidence.error is not None:
        return Ending.RAISED, f"{evidence.error.type}: {evidence.error.message}"
    if after.signal is not None:
        return Ending.SIGNALLED, f"the process was ended by {_signal_name(after.signal)}"
    if evidence.last_word is FrameKind.FINISHED and after.exit_code == 0:
        return Ending.FINISHED, "the entry returned"
    return Ending.EXITED, f"the process left with status {after.exit_code} before the entry returned"


def _sentence_of_cut(cut: Cut, limits: Limits) -> str:
    return {
        Cut.TIMED_OUT: f"the process ran longer than {limits.wall_s:g} s and was ended",
        Cut.OUT_OF_MEMORY: f"the process used more than {limits.memory_bytes >> 20} MiB of memory and was ended",
        Cut.TOO_MANY_PROCESSES: f"over {limits.processes} processes or {limits.threads} threads ran and were ended",
        Cut.CANCELLED: "the process was cancelled",
    }[cut]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
