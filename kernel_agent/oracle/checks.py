"""What the cross-check of the truth finds: records of comparisons that judge the oracle and the user's file."""

from __future__ import annotations

import enum

from pydantic import Field

from kernel_agent.record import Record


class Outcome(str, enum.Enum):
    """What one comparison says."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    INCONCLUSIVE = "inconclusive"


class DerivativeCheck(Record):
    """A directional derivative of one combination of outputs."""

    outputs: tuple[str, ...]
    exact: float = Field(description="<gradient, direction>")
    numeric: float = Field(description="central difference along the direction")
    relative_difference: float
    outcome: Outcome
    reason: str = ""


class ReferenceCheck(Record):
    """One output, or one gradient, against the user's `reference`."""

    output: str = Field(description="name of the output; for a gradient the name of the input it belongs to")
    gradient: bool = Field(default=False, description="True when autograd through the reference is compared")
    outcome: Outcome
    relative_error: float = Field(default=0.0, description="largest error over the RMS of the values")
    tolerance: float = Field(default=0.0, description="largest relative error that counts as agreement")
    worst: tuple[int, ...] = Field(default=(), description="index of the element that differs most")
    exact: float = Field(default=0.0, description="the kernels' value there")
    reference: float = Field(default=0.0, description="the reference's value there")
    reason: str = ""


class CrossCheck(Record):
    """What both looks say at one point."""

    point: str
    derivatives: tuple[DerivativeCheck, ...] = ()
    references: tuple[ReferenceCheck, ...] = Field(default=(), description="outputs, then gradients")
    precision: str = Field(
        default="", description="coarsest dtype the reference computes in, such as `float16`; empty when float64"
    )
    skipped: str = Field(default="", description="why there are no derivative checks, if there are none")

    @property
    def agrees(self) -> bool:
        """True when nothing disagrees; an inconclusive comparison does not."""
        outcomes = [c.outcome for c in self.derivatives] + [c.outcome for c in self.references]
        return Outcome.DISAGREES not in outcomes
