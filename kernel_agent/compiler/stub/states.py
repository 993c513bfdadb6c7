"""`States`: what the forward keeps of the trips of a loop that hands tensors on."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.stub.loops import Carry, Loop


@dataclass(frozen=True)
class States:
    """What trips of a loop began with, which the forward keeps in a list: one after the other of each trip."""

    name: str
    """Of the list."""
    loop: Loop
    carries: tuple[Carry, ...]
    """What is kept."""

    @property
    def made(self) -> str:
        """The statement ahead of the loop."""
        return f"{self.name} = []"

    @property
    def grown(self) -> str:
        """The statement at the start of a trip."""
        return f"{self.name} += [{', '.join(one.name for one in self.carries)}]"

    def of(self, carry: Carry) -> str:
        """What is kept of one, by trips."""
        step = len(self.carries)
        return self.name if step == 1 else f"{self.name}[{self.carries.index(carry)}::{step}]"
