"""The one record that `--json` puts on stdout at the end of a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kernel_agent.agent.events import Outcome
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.gate.verdict import Verdict
from kernel_agent.models.protocol import Usage


class FinalRecord(BaseModel):
    """What a run came to, for a program. `verdict.status` says GREEN or what is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    run: str = Field(description="the run folder, as a path from the working directory or absolute, as it was given")
    outcome: Outcome
    verdict: Verdict | None = Field(description="of the best candidate; null when no reply held code")
    candidate: str | None = Field(description="digest of the best candidate")
    files: tuple[str, ...] = Field(description="delivered files")
    backend: str
    model: str
    asks: int
    usage: Usage
    cost_usd: float | None = Field(description="null when the price of a reply is unknown")


def final_record(run: FinishedRun) -> FinalRecord:
    """The record of a run."""
    state, started = run.state, run.state.started
    return FinalRecord(
        run=str(run.folder.path),
        outcome=run.outcome,
        verdict=state.best.verdict if state.best else None,
        candidate=state.best.digest if state.best else None,
        files=tuple(str(run.folder.product / name) for name in (state.delivered.files if state.delivered else ())),
        backend=started.backend.value if started else "",
        model=started.model if started else "",
        asks=len(state.rounds),
        usage=state.usage,
        cost_usd=None if state.unpriced else state.cost_usd,
    )
