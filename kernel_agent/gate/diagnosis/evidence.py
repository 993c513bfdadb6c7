"""What is known of a red candidate when the cases are over: all that a diagnosis is made from."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.gate.batch import Outcome
from kernel_agent.gate.candidate import CandidateText


@dataclass(frozen=True)
class Evidence:
    """The cases at the shape of the first red one, with the candidate's gradients."""

    text: CandidateText
    red: Outcome
    """The first red case; its `problem` is the one the verdict names."""
    here: tuple[Outcome, ...]
    """Every case at its shape in the order of the plan, `red` among them."""

    def wrong(self, outcome: Outcome) -> tuple[str, ...]:
        """Gradients of a case that were compared by value and differ."""
        return tuple(s.grad for s in outcome.result.grads if not s.passed and s.grad in outcome.given)
