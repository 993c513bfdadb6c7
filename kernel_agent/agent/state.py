"""`RunState`: where a run stands, as a fold over its events. Nothing else of a run is kept in memory.

The loop looks at the state to find the next step, so it continues after a kill exactly where the ledger ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry, Event, Measurement, PhaseName, PromptName
from kernel_agent.config import RunConfig
from kernel_agent.gate.verdict import Verdict
from kernel_agent.models.protocol import Conversation, Reply, Role, Turn, Usage
from kernel_agent.pairs.spec import KernelSpec

NOTHING_USED = Usage()


@dataclass(frozen=True)
class Work:
    """A judged candidate."""

    digest: str
    """Its snapshot."""
    number: int
    """The ask it answers."""
    verdict: Verdict
    measurement: Measurement | None = None
    """Its time, where one was taken."""


@dataclass(frozen=True)
class Round:
    """One ask and what came of it so far."""

    number: int
    phase: PhaseName
    prompt: PromptName
    conversation: Conversation
    digest: str
    """Of the conversation."""
    reply: Reply | None = None
    candidate: str | None = None
    """Digest of the candidate; None while unknown and when the reply held no code."""
    notes: tuple[str, ...] = ()
    """What of the reply was left out."""
    verdict: Verdict | None = None
    settled: bool = False
    """True once it is recorded whether the candidate is kept or set aside."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands."""

    started: ev.RunStarted | None = None
    config: RunConfig | None = None
    """The configuration in force: a resumed run may have been given a larger budget."""
    spec: KernelSpec | None = None
    truth: ev.TruthCrossChecked | None = None
    retrieval: ev.PairsRetrieved | None = None
    begun: frozenset[PhaseName] = frozenset()
    """Phases that were started."""
    over: frozenset[PhaseName] = frozenset()
    """Phases that ended or were skipped."""
    rounds: tuple[Round, ...] = ()
    best: Work | None = None
    """The best candidate so far."""
    base: Work | None = None
    """The candidate that the next ask works on: the last one, or the best after a rollback."""
    stale: int = 0
    """Asks since the last progress or rollback."""
    rolled_back: bool = False
    """True between a rollback and the next ask."""
    measurements: tuple[tuple[str, Measurement], ...] = ()
    """Times by digest of the candidate."""
    usage: Usage = NOTHING_USED
    """Tokens of all replies."""
    cost_usd: float = 0.0
    """Cost of all replies whose price is known."""
    unpriced: int = 0
    """Replies whose price is unknown."""
    exhausted: str = ""
    """Why no further ask is allowed, or empty."""
    delivered: ev.Delivered | None = None
    finished: ev.Finished | None = None

    @property
    def open(self) -> Round | None:
        """The round that is not settled yet."""
        return self.rounds[-1] if self.rounds and not self.rounds[-1].settled else None

    @property
    def green(self) -> bool:
        """True when the best candidate is accepted."""
        return self.best is not None and self.best.verdict.green

    def measured(self, digest: str) -> Measurement | None:
        """The time of a candidate, if one was taken."""
        return next((time for known, time in self.measurements if known == digest), None)

    def judged(self, digest: str) -> Round | None:
        """The earlier round with the same candidate, if its verdict is known."""
        return next((r for r in self.rounds if r.candidate == digest and r.verdict is not None), None)


def fold(entries: Iterable[Entry], state: RunState | None = None) -> RunState:
    """The state after a sequence of ledger lines."""
    state = state or RunState()
    for entry in entries:
        state = advance(state, entry.event)
    return state


def advance(state: RunState, event: Event) -> RunState:
    """The state after one more event."""
    match event:
        case ev.RunStarted():
            return replace(state, started=event, config=event.config)
        case ev.Resumed():
            return _after_resuming(state, event)
        case ev.SpecDescribed():
            return replace(state, spec=event.spec)
        case ev.TruthCrossChecked():
            return replace(state, truth=event)
        case ev.PairsRetrieved():
            return replace(state, retrieval=event)
        case ev.PhaseStarted():
            return replace(state, begun=state.begun | {event.phase}, stale=0)
        case ev.PhaseEnded() | ev.PhaseSkipped():
            return replace(state, over=state.over | {event.phase})
        case ev.Asked():
            return replace(state, rounds=(*state.rounds, _round(state, event)), rolled_back=False)
        case ev.Replied():
            return _after_reply(state, event)
        case ev.CandidateExtracted():
            return _in_last_round(state, candidate=event.digest, notes=event.notes)
        case ev.Judged():
            return _after_verdict(state, event)
        case ev.Measured():
            return _after_measurement(state, event)
        case ev.SnapshotKept():
            return replace(_in_last_round(state, settled=True), best=state.base, stale=0)
        case ev.SetAside():
            return replace(_in_last_round(state, settled=True), stale=state.stale + 1)
        case ev.RolledBack():
            return replace(state, base=state.best, stale=0, rolled_back=True)
        case ev.BudgetExhausted():
            return replace(state, exhausted=event.line)
        case ev.Delivered():
            return replace(state, delivered=event)
        case ev.Finished():
            return replace(state, finished=event)
        case ev.Interrupted():
            return state


def _after_resuming(state: RunState, event: ev.Resumed) -> RunState:
    before, now = state.config, event.config
    state = replace(state, config=now)
    if state.delivered is not None or before is None or _limits(before) == _limits(now):
        return state
    # With another budget a run that ended red is open again.
    asking = {PhaseName.BACKWARD, PhaseName.OPTIMIZE}
    return replace(state, exhausted="", finished=None, over=state.over - asking, stale=0)


def _limits(config: RunConfig) -> tuple[float | None, ...]:
    return (config.max_iters, config.max_tokens, config.max_cost_usd)


def _in_last_round(state: RunState, **changes: object) -> RunState:
    return replace(state, rounds=(*state.rounds[:-1], replace(state.rounds[-1], **changes)))  # type: ignore[arg-type]


def _round(state: RunState, event: ev.Asked) -> Round:
    last = state.rounds[-1].conversation if state.rounds else None
    system = event.system if event.system is not None or last is None else last.system
    opening = event.opening if event.opening is not None or last is None else last.turns[0].text
    turns = (Turn(role=Role.USER, text=opening or ""), *event.turns)
    return Round(event.number, event.phase, event.prompt, Conversation(system=system or "", turns=turns), event.digest)


def _after_reply(state: RunState, event: ev.Replied) -> RunState:
    used, more, cost = state.usage, event.reply.usage, event.reply.cost_usd
    usage = Usage(
        input=used.input + more.input,
        cached=used.cached + more.cached,
        output=used.output + more.output,
        reasoning=used.reasoning + more.reasoning,
        cache_written=used.cache_written + more.cache_written,
    )
    state = replace(
        state, usage=usage, cost_usd=state.cost_usd + (cost or 0.0), unpriced=state.unpriced + (cost is None)
    )
    return _in_last_round(state, reply=event.reply)


def _after_verdict(state: RunState, event: ev.Judged) -> RunState:
    state = _in_last_round(state, verdict=event.verdict)
    if event.digest is None:
        return state
    return replace(state, base=Work(event.digest, event.number, event.verdict, state.measured(event.digest)))


def _after_measurement(state: RunState, event: ev.Measured) -> RunState:
    def timed(work: Work | None) -> Work | None:
        return (
            replace(work, measurement=event.measurement) if work is not None and work.digest == event.digest else work
        )

    known = (*state.measurements, (event.digest, event.measurement))
    return replace(state, measurements=known, best=timed(state.best), base=timed(state.base))
