"""`GateTried`: the event of what the gate did to wrong gradients of a run's forward, or to mutants of its backward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Literal

from pydantic import Field

from kernel_agent.gate.mutants.records import MutationTally
from kernel_agent.record import Record


class GateTried(Record):
    """The gate was shown backwards that are wrong."""

    event: Literal["gate_tried"] = "gate_tried"
    digest: str | None = Field(default=None, description="whose mutants; None for gradients made of the truth alone")
    tally: MutationTally


def tally_of(tried: Iterable[GateTried], digest: str) -> MutationTally | None:
    """What the gate was shown that concerns a candidate: gradients of its forward, and mutants of it. None: nothing."""
    tallies = [event.tally for event in tried if event.digest in (None, digest)]
    return reduce(add, tallies) if tallies else None
