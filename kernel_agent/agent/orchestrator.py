"""The loop of a run: reference, backward, optimize, deliver.

Every step looks at the state, does what is missing, and records the outcome before the next. A run that was killed is
run again from the top: steps whose outcome is in the ledger are passed over, and the first one missing is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent import events as ev
from kernel_agent.agent.backward import backward
from kernel_agent.agent.confirm import confirmed
from kernel_agent.agent.delivery import finish
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.gateproof import try_backward
from kernel_agent.agent.optimize import optimize
from kernel_agent.agent.reference import TruthDoubted, described, reference, retrieve
from kernel_agent.agent.runfolder import RunFolder
from kernel_agent.agent.start import derive_draft
from kernel_agent.agent.state import RunState

__all__ = ["FinishedRun", "TruthDoubted", "described", "run_to_end"]


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end."""

    folder: RunFolder
    state: RunState

    @property
    def outcome(self) -> ev.Outcome:
        """Delivered, or not."""
        return ev.Outcome.NO_GREEN_VERDICT if self.state.finished is None else self.state.finished.outcome


def run_to_end(desk: Desk) -> FinishedRun:
    """Do what is left of a run. Raises `KernelAgentError`s of the rooms; the ledger stays resumable."""
    if desk.state.finished is None:
        reference(desk)
        retrieve(desk)
        derive_draft(desk)
        backward(desk)
        while not confirmed(desk):  # red on this GPU: phase 2 is open again
            backward(desk)
        optimize(desk)
        try_backward(desk)
        finish(desk)
    return FinishedRun(desk.folder, desk.state)
