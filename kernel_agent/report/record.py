"""The one record that `--json` puts on stdout at the end of a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kernel_agent.agent.events import Outcome
from kernel_agent.agent.gatetried import tally_of
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.bench.records import Measurement
from kernel_agent.errors import ExitCode, KernelAgentError
from kernel_agent.gate.mutants.records import MutationTally
from kernel_agent.gate.verdict import Verdict
from kernel_agent.models.protocol import Usage
from kernel_agent.report.table import reason


class FinalRecord(BaseModel):
    """What a run came to, for a program. `verdict.status` says GREEN or what is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    run: str = Field(description="the run folder, as a path from the working directory or absolute, as it was given")
    outcome: Outcome | None = Field(description="null when the run did not come to its end")
    reason: str = Field(description="one line: why it ended as it did")
    remedy: str = Field(default="", description="what to do about it, if anything")
    resume: str | None = Field(default=None, description="the command that goes on with a run that was stopped")
    exit_code: int
    verdict: Verdict | None = Field(description="of the best candidate; null when there is none, `reason` says why")
    candidate: str | None = Field(description="digest of the best candidate")
    speed: Measurement | None = Field(
        default=None, description="time of the best candidate, measured or modelled; null when none was taken"
    )
    mutants: MutationTally | None = Field(
        default=None, description="wrong gradients and wrong backwards before the gate; null where none were made"
    )
    first_us: float | None = Field(
        default=None, description="the same of the first proven candidate: what phase 3 began with"
    )
    files: tuple[str, ...] = Field(description="delivered files")
    schedules: tuple[str, ...] = Field(default=(), description="of the best candidate, where the compiler derived it")
    backend: str
    model: str
    asks: int
    usage: Usage
    cost_usd: float | None = Field(description="null when the price of a reply is unknown")


class StoppedRecord(BaseModel):
    """What `--json` prints instead when there is no run: the input was wrong, or something is missing here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str
    remedy: str
    exit_code: int


def final_record(run: FinishedRun) -> FinalRecord:
    """The record of a run that came to its end."""
    code = ExitCode.OK if run.outcome is Outcome.DELIVERED else ExitCode.RED
    record = _record(run, reason=reason(run), exit_code=code)
    return record.model_copy(update={"outcome": run.outcome})


def stopped_run_record(run: FinishedRun, error: KernelAgentError, *, resume: str) -> FinalRecord:
    """The record of a run that an error, a signal or a missing reply stopped."""
    record = _record(run, reason=error.message, exit_code=error.exit_code)
    return record.model_copy(update={"remedy": error.remedy, "resume": resume})


def _record(run: FinishedRun, *, reason: str, exit_code: ExitCode) -> FinalRecord:
    state, started = run.state, run.state.started
    derived = state.derived is not None and state.best is not None and state.best.number == 0
    return FinalRecord(
        run=str(run.folder.path),
        outcome=None,
        reason=reason,
        exit_code=int(exit_code),
        verdict=state.best.verdict if state.best else None,
        candidate=state.best.digest if state.best else None,
        speed=state.best.measurement if state.best else None,
        mutants=tally_of(state.tried, state.best.digest) if state.best else None,
        first_us=state.measurements[0][1].geomean_us if state.measurements else None,
        files=tuple(str(run.folder.product / name) for name in (state.delivered.files if state.delivered else ())),
        schedules=state.derived.schedules if derived and state.derived is not None else (),
        backend=started.backend.value if started else "",
        model=started.model if started else "",
        asks=len(state.rounds),
        usage=state.usage,
        cost_usd=None if state.unpriced else state.cost_usd,
    )
