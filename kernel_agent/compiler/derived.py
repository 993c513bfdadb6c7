"""What the compiler makes of a forward: `Draft`, a pair that was written, and `Derived`, one that is proven."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.spec import Candidate


@dataclass(frozen=True)
class Draft:
    """A pair that was written and not judged."""

    schedule: str
    """The schedule that was asked for."""
    candidate: Candidate
    pair: str
    """The whole pair file."""
    schedules: tuple[str, ...]
    """The schedule of every launch of the forward that has a backward, from the last to the first."""
    remarks: tuple[str, ...]
    """Why something was left as it is."""
    seconds: float
    """What writing it took."""
    adjoint: str = ""
    """What the backwards of the launches compute, before any schedule; empty where that cannot be written, or was not
    asked for."""


@dataclass(frozen=True)
class DraftCost:
    """What one pair's backward costs at one entry, counted and modelled, not measured."""

    schedules: tuple[str, ...]
    """See `Draft`."""
    label: str
    """Of the entry."""
    bytes: float = 0.0
    """Different bytes per launch, all launches and torch functions together."""
    flops: float = 0.0
    """Operations on floats."""
    atomics: float = 0.0
    """Elements that are added to atomically."""
    programs: int = 0
    """Of the launch with the fewest."""
    microseconds: float | None = None
    """Modelled; None where it cannot be counted."""
    why: str = ""
    """Why not, or how it compares: why it is not the first."""


@dataclass(frozen=True)
class Derived:
    """A pair that the gate accepts."""

    draft: Draft
    verdict: Verdict
    """Green."""
    refused: tuple[str, ...]
    """Why better schedules were not taken: not derivable, or red in the gate."""
    seconds: float
    """From the spec to the verdict."""
    costs: tuple[DraftCost, ...] = ()
    """Of all pairs that could be written, in the order in which they are tried; empty where they were not compared."""
