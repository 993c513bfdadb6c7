"""The phases of a run as data: what each is for and which prompts it uses."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent.events import PhaseName, PromptName


@dataclass(frozen=True)
class Phase:
    """One phase."""

    name: PhaseName
    purpose: str
    """One line, shown when the phase starts."""
    prompts: tuple[PromptName, ...] = ()
    """Templates its asks are made from; empty for a phase that asks nothing."""


REFERENCE = Phase(PhaseName.REFERENCE, "exact gradients of the forward, cross-checked by finite differences")
BACKWARD = Phase(
    PhaseName.BACKWARD,
    "draft a backward and repair it until every check passes",
    (PromptName.PLAN, PromptName.DRAFT, PromptName.REPAIR, PromptName.NO_CODE, PromptName.EDIT_FAILED),
)
OPTIMIZE = Phase(
    PhaseName.OPTIMIZE,
    "make the proven backward faster, keeping only what stays proven",
    (PromptName.OPTIMIZE, PromptName.REPAIR, PromptName.NO_CODE, PromptName.EDIT_FAILED),
)
PHASES = (REFERENCE, BACKWARD, OPTIMIZE)
