"""The phases of a run as data: what each is for."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent.events import PhaseName


@dataclass(frozen=True)
class Phase:
    """One phase."""

    name: PhaseName
    purpose: str
    """One line, shown when the phase starts."""


REFERENCE = Phase(PhaseName.REFERENCE, "exact gradients of the forward, cross-checked by finite differences")
BACKWARD = Phase(PhaseName.BACKWARD, "draft a backward and repair it until every check passes")
OPTIMIZE = Phase(PhaseName.OPTIMIZE, "make the proven backward faster, keeping only what stays proven")
