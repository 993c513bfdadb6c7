"""`Chosen`: a launch of the backward with the numbers that it may choose for itself, under names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernel_agent.compiler.plan import Step
from kernel_agent.compiler.stub.tiles import Tiles


@dataclass(frozen=True)
class Chosen:
    """A launch, with variables for what it chooses for itself."""

    step: Step
    tiles: Tiles
    options: Mapping[str, str] = field(default_factory=dict)
    """`num_warps` and `num_stages` -> variable."""

    def takes(self, name: str) -> bool:
        """Whether its kernel has an argument of a name."""
        return any(value.name == name for value in self.step.kernel.arguments)
