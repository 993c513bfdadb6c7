"""`Derived`: the event of what the compiler made of a run's forward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kernel_agent.gate.verdict import Verdict
from kernel_agent.record import Record


class Derived(Record):
    """The compiler has read the forward: its adjoint, and the backward that it derives, judged."""

    event: Literal["derived"] = "derived"
    digest: str | None = Field(default=None, description="the derived candidate; None where none was wanted or had")
    schedules: tuple[str, ...] = Field(default=(), description="of the launches, from the last to the first")
    remarks: tuple[str, ...] = Field(default=(), description="why something was left as it is")
    refused: tuple[str, ...] = Field(default=(), description="why better schedules were not taken")
    verdict: Verdict | None = Field(default=None, description="of the candidate: green, or red on a GPU since")
    reason: str = Field(default="", description="why nothing is derived; empty otherwise")
    remedy: str = Field(default="", description="what to do about that; empty where it was not told")
    adjoint: str = Field(default="", description="what the backwards of the launches compute, before any schedule")
    seconds: float = 0.0
