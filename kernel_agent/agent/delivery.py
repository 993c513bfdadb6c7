"""The end of a run: the best candidate is delivered when it is proven, else its verdict is what the run came to."""

from __future__ import annotations

from kernel_agent.agent import events as ev
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.explain import headline
from kernel_agent.agent.gatetried import tally_of
from kernel_agent.agent.state import RunState
from kernel_agent.certificate.record import Provenance
from kernel_agent.config import Backend


def finish(desk: Desk) -> None:
    """Record the last event."""
    best = desk.state.best
    if best is None or not best.verdict.green:
        none = "no reply held code" if desk.state.rounds else f"nothing was asked: {desk.state.exhausted}"
        line = none if best is None else f"the best candidate is {headline(best.verdict)}"
        digest = best.digest if best else None
        desk.record(ev.Finished(outcome=ev.Outcome.NO_GREEN_VERDICT, digest=digest, line=line))
        return
    line = headline(best.verdict)
    if desk.state.delivered is None:
        candidate, folder = desk.snapshots.get(best.digest), desk.folder.product
        mutants = tally_of(desk.state.tried, best.digest)
        files = desk.tools.deliver(desk.spec, candidate, best.verdict, provenance_of(desk.state), folder, mutants)
        desk.record(ev.Delivered(files=tuple(path.relative_to(folder).as_posix() for path in files), line=line))
    desk.record(ev.Finished(outcome=ev.Outcome.DELIVERED, digest=best.digest, line=line))


def provenance_of(state: RunState) -> Provenance:
    """Where the best candidate of a run came from and what the run cost. Raises `ValueError` before a run has begun."""
    if state.started is None:
        raise ValueError("the ledger says nothing of how the run began")
    derived = state.best is not None and state.best.number == 0
    return Provenance(
        backend=Backend.COMPILER.value if derived else state.started.backend.value,
        model=Backend.COMPILER.value if derived else state.started.model,
        asks=state.asks,
        input_tokens=state.usage.input,
        output_tokens=state.usage.output,
        cost_usd=None if state.unpriced else state.cost_usd,
        run_id=state.started.run_id,
        speed=None if state.best is None else state.best.measurement,
    )
