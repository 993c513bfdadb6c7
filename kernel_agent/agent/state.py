"""`RunState`: where a run stands, as a fold over its events. Nothing else of a run is kept in memory.

The loop looks at the state to find the next step, so it continues after a kill exactly where the ledger ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry, Event, PhaseName, PromptName
from kernel_agent.bench.records import Basis, Measurement
from kernel_agent.config import RunConfig
from kernel_agent.gate.verdict import Verdict
from kernel_agent.machine import Machine
from kernel_agent.models.protocol import Conversation, Reply, Role, Turn, Usage, UsageKind
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import KernelSpec

NOTHING_USED = Usage()


@dataclass(frozen=True)
class Work:
    """A judged candidate."""

    digest: str
    """Its snapshot."""
    number: int
    """The ask it answers; 0 for the derived one."""
    verdict: Verdict
    measurement: Measurement | None = None
    """Its time, where one was taken."""

    @property
    def source(self) -> str:
        """Whose it is, in words."""
        return f"that of ask {self.number}" if self.number else "the derived one"


@dataclass(frozen=True)
class Round:
    """One ask and what came of it so far."""

    number: int
    phase: PhaseName
    prompt: PromptName
    conversation: Conversation
    digest: str
    """Of the conversation."""
    estimated_input: int = 0
    """Tokens, estimated before asking."""
    anchor: str | None = None
    """The pair that a draft is to be written after."""
    free: bool = False
    """A retry of the same intent, which does not count as an ask."""
    base: str | None = None
    """Digest of the candidate that it shows."""
    locked: tuple[str, ...] = ()
    """Gradients of the shown candidate that are right and to be left alone."""
    reply: Reply | None = None
    candidate: str | None = None
    """Digest of the candidate; None while unknown and when the reply held no code."""
    fingerprint: str | None = None
    """Of the candidate's code."""
    notes: tuple[str, ...] = ()
    """What of the reply was left out."""
    edit_failed: str = ""
    """Why the edits of the reply do not apply; empty otherwise."""
    verdict: Verdict | None = None
    same_as: int | None = None
    """The earlier ask whose candidate this one repeats."""
    spliced: ev.Spliced | None = None
    """The candidate that was put together from this one and an earlier one."""
    spliced_verdict: Verdict | None = None
    outcome: str = ""
    """In what the candidate is better than the best, or not; empty until settled."""
    kept: bool = False
    settled: bool = False
    """True once nothing more is to be done about it."""

    @property
    def works(self) -> tuple[Work, ...]:
        """Its judged candidates: that of the reply, then the spliced one."""
        own = (
            () if self.candidate is None or self.verdict is None else (Work(self.candidate, self.number, self.verdict),)
        )
        if self.spliced is None or self.spliced_verdict is None:
            return own
        return (*own, Work(self.spliced.digest, self.number, self.spliced_verdict))


@dataclass(frozen=True)
class RunState:
    """Where a run stands."""

    started: ev.RunStarted | None = None
    config: RunConfig | None = None
    """The configuration in force: a resumed run may have been given a larger budget."""
    machine: Machine | None = None
    """Where the run is worked on."""
    spec: KernelSpec | None = None
    truth: ev.TruthCrossChecked | None = None
    tried: tuple[ev.GateTried, ...] = ()
    """What the gate was shown that is wrong."""
    facts: ForwardFacts | None = None
    """What the forward does with memory."""
    retrieval: ev.PairsRetrieved | None = None
    derived: ev.Derived | None = None
    plan: ev.Planned | None = None
    """The last answer to an ask for a plan, valid or not."""
    techniques: tuple[ev.TechniquesRetrieved, ...] = ()
    """Searches for single gradients."""
    drafts: ev.DraftsPlanned | None = None
    begun: frozenset[PhaseName] = frozenset()
    """Phases that were started."""
    over: frozenset[PhaseName] = frozenset()
    """Phases that ended or were skipped."""
    rounds: tuple[Round, ...] = ()
    best: Work | None = None
    """The best candidate so far."""
    base: Work | None = None
    """The candidate that the next ask works on: the last one, or the best after a rollback and after the drafts."""
    confirmed: frozenset[str] = frozenset()
    """Digests of candidates that were proven elsewhere and judged again on this machine's GPU."""
    lock: ev.Locked | None = None
    """The last gradients that were locked."""
    stale: int = 0
    """Asks since the last progress or rollback."""
    idle: int = 0
    """Asks since the last progress in this phase, rollbacks aside."""
    rolled_back: bool = False
    """True between a rollback and the next ask."""
    measurements: tuple[tuple[str, Measurement], ...] = ()
    """Times by digest of the candidate, in the order they were taken."""
    tuned: ev.TunedEvent | None = None
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
    def open(self) -> tuple[Round, ...]:
        """The rounds that are not settled yet: several while drafts are made at once."""
        return tuple(r for r in self.rounds if not r.settled)

    @property
    def asks(self) -> int:
        """Asks that count."""
        return sum(not r.free for r in self.rounds)

    @property
    def green(self) -> bool:
        """True when the best candidate is accepted."""
        return self.best is not None and self.best.verdict.green

    @property
    def draft(self) -> Work | None:
        """The derived candidate, where it is proven."""
        found = self.derived
        if found is None or found.digest is None or found.verdict is None or not found.verdict.green:
            return None
        return Work(found.digest, 0, found.verdict)

    def round(self, number: int) -> Round:
        """The round with this number."""
        return self.rounds[number - 1]

    def measured(self, digest: str, basis: Basis | None = None) -> Measurement | None:
        """The last time taken of a candidate, on this basis if one is given."""
        known = (time for name, time in reversed(self.measurements) if name == digest)
        return next((time for time in known if basis is None or time.basis is basis), None)

    def judged(self, digest: str, fingerprint: str | None = None) -> Work | None:
        """The first candidate with this digest, or with this fingerprint, whose verdict is known."""
        if self.draft is not None and self.draft.digest == digest:
            return self.draft
        for known in self.rounds:
            for work in known.works:
                same = fingerprint is not None and work.digest == known.candidate and fingerprint == known.fingerprint
                if work.digest == digest or same:
                    return work
        return None


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
            machine = Machine(gpu=event.gpu, versions=event.versions)
            return replace(state, started=event, config=event.config, machine=machine)
        case ev.Resumed():
            return _after_resuming(state, event)
        case ev.SpecDescribed():
            return replace(state, spec=event.spec)
        case ev.TruthCrossChecked():
            return replace(state, truth=event)
        case ev.GateTried():
            return replace(state, tried=(*state.tried, event))
        case ev.ForwardAnalysed():
            return replace(state, facts=event.facts)
        case ev.PairsRetrieved():
            return replace(state, retrieval=event)
        case ev.Derived():
            state = replace(state, derived=event)
            return state if state.draft is None else replace(state, best=state.draft, base=state.draft)
        case ev.PhaseStarted():
            return replace(state, begun=state.begun | {event.phase}, stale=0, idle=0)
        case ev.PhaseEnded() | ev.PhaseSkipped():
            return replace(state, over=state.over | {event.phase})
        case ev.Planned():
            return replace(_in_round(state, event.number, settled=True), plan=event)
        case ev.TechniquesRetrieved():
            return replace(state, techniques=(*state.techniques, event))
        case ev.DraftsPlanned():
            return replace(state, drafts=event)
        case ev.Locked():
            return replace(state, lock=event)
        case ev.BudgetExhausted():
            return replace(state, exhausted=event.line)
        case ev.Delivered():
            return replace(state, delivered=event)
        case ev.Finished():
            return replace(state, finished=event)
        case ev.Interrupted():
            return state
    return _in_rounds(state, event)


def _in_rounds(state: RunState, event: Event) -> RunState:
    """The state after an event of an ask or of a candidate."""
    match event:
        case ev.Asked():
            return replace(state, rounds=(*state.rounds, _round(state, event)), rolled_back=False)
        case ev.Replied():
            return _after_reply(state, event)
        case ev.CandidateExtracted():
            notes, code = event.notes, event.fingerprint
            return _in_round(state, event.number, candidate=event.digest, notes=notes, fingerprint=code)
        case ev.EditFailed():
            # The first failure is retried; only that of the retry is an ask without progress.
            lost = int(state.round(event.number).free)
            state = replace(state, stale=state.stale + lost, idle=state.idle + lost)
            return _in_round(state, event.number, edit_failed=event.line, settled=True)
        case ev.Spliced():
            return _in_round(state, event.number, spliced=event)
        case ev.Judged():
            known = state.round(event.number)
            if known.spliced is not None and event.digest == known.spliced.digest:
                return _in_round(state, event.number, spliced_verdict=event.verdict)
            return _in_round(state, event.number, verdict=event.verdict, same_as=event.same_as)
        case ev.Measured():
            return _with_time(state, event.digest, event.measurement)
        case ev.TunedEvent():
            return _after_tuning(state, event)
        case ev.Confirmed():
            return _after_confirming(state, event)
        case ev.SnapshotKept():
            work = _work(state, event.number, event.digest)
            state = _in_round(state, event.number, settled=True, kept=True, outcome=event.line)
            return replace(state, best=work, base=work, stale=0, idle=0)
        case ev.SetAside():
            return _after_setting_aside(state, event)
        case ev.RolledBack():
            return replace(state, base=state.best, stale=0, rolled_back=True)
    raise AssertionError(f"an event that changes nothing: {event.event}")


def _after_resuming(state: RunState, event: ev.Resumed) -> RunState:
    before, now = state.config, event.config
    state = replace(_moved(state, event.machine), config=now)
    if state.delivered is not None or before is None or _limits(before) == _limits(now):
        return state
    # With another budget a run that ended red is open again; what is proven already needs no second proof.
    asking = {PhaseName.OPTIMIZE} if state.green else {PhaseName.BACKWARD, PhaseName.OPTIMIZE}
    return replace(state, exhausted="", finished=None, over=state.over - asking, stale=0, idle=0)


def _moved(state: RunState, machine: Machine | None) -> RunState:
    """On a machine whose times cannot be compared with the earlier one's, nothing is timed yet."""
    before = state.machine
    if machine is None or before is None or machine.times_as(before):
        return replace(state, machine=machine or before)
    best, base = (None if work is None else replace(work, measurement=None) for work in (state.best, state.base))
    return replace(state, machine=machine, measurements=(), tuned=None, confirmed=frozenset(), best=best, base=base)


def _limits(config: RunConfig) -> tuple[float | None, ...]:
    return (config.max_iters, config.max_tokens, config.max_cost_usd)


def _in_round(state: RunState, number: int, **changes: object) -> RunState:
    changed = replace(state.round(number), **changes)  # type: ignore[arg-type]
    return replace(state, rounds=(*state.rounds[: number - 1], changed, *state.rounds[number:]))


def _round(state: RunState, event: ev.Asked) -> Round:
    last = state.rounds[-1].conversation if state.rounds else None
    system = event.system if event.system is not None or last is None else last.system
    opening = event.opening if event.opening is not None or last is None else last.turns[0].text
    turns = (Turn(role=Role.USER, text=opening or ""), *event.turns)
    lock = state.lock
    return Round(
        number=event.number,
        phase=event.phase,
        prompt=event.prompt,
        conversation=Conversation(system=system or "", turns=turns),
        digest=event.digest,
        estimated_input=event.estimated_input,
        anchor=event.anchor,
        free=event.free,
        base=event.base,
        locked=lock.grads if lock is not None and lock.digest == event.base else (),
    )


def _after_reply(state: RunState, event: ev.Replied) -> RunState:
    used, more, cost = state.usage, event.reply.usage, event.reply.cost_usd
    usage = Usage(
        kind=UsageKind.ESTIMATED if UsageKind.ESTIMATED in {used.kind, more.kind} else UsageKind.REPORTED,
        input=used.input + more.input,
        cached=used.cached + more.cached,
        output=used.output + more.output,
        reasoning=used.reasoning + more.reasoning,
        cache_written=used.cache_written + more.cache_written,
    )
    state = replace(
        state, usage=usage, cost_usd=state.cost_usd + (cost or 0.0), unpriced=state.unpriced + (cost is None)
    )
    return _in_round(state, event.number, reply=event.reply)


def _work(state: RunState, number: int, digest: str) -> Work:
    work = next(work for work in state.round(number).works if work.digest == digest)
    return replace(work, measurement=state.measured(digest))


def _after_setting_aside(state: RunState, event: ev.SetAside) -> RunState:
    state = _in_round(state, event.number, settled=True, outcome=event.line)
    if state.round(event.number).prompt is PromptName.DRAFT:
        return state  # of several drafts the best is repaired, not the last
    state = replace(state, stale=state.stale + 1, idle=state.idle + 1)
    if event.digest is None:
        return state
    return replace(state, base=_work(state, event.number, event.digest))


def _after_tuning(state: RunState, event: ev.TunedEvent) -> RunState:
    state, tuned = replace(state, tuned=event), event.tuned
    if tuned.best is None or event.verdict is None or state.best is None:
        return state
    work = Work(tuned.best, state.best.number, event.verdict)
    state = replace(state, best=work, base=work)
    return state if tuned.measurement is None else _with_time(state, tuned.best, tuned.measurement)


def _after_confirming(state: RunState, event: ev.Confirmed) -> RunState:
    """The verdict of both tiers takes the place of the earlier one wherever that is kept."""

    def judged(work: Work | None) -> Work | None:
        return replace(work, verdict=event.verdict) if work is not None and work.digest == event.digest else work

    for known in state.rounds:
        if known.candidate == event.digest and known.verdict is not None:
            state = _in_round(state, known.number, verdict=event.verdict)
        if known.spliced is not None and known.spliced.digest == event.digest:
            state = _in_round(state, known.number, spliced_verdict=event.verdict)
    if state.derived is not None and state.derived.digest == event.digest:
        state = replace(state, derived=state.derived.model_copy(update={"verdict": event.verdict}))
    over = state.over if event.verdict.green else state.over - {PhaseName.BACKWARD}
    best, base = judged(state.best), judged(state.base)
    return replace(state, best=best, base=base, over=over, confirmed=state.confirmed | {event.digest})


def _with_time(state: RunState, digest: str, measurement: Measurement) -> RunState:
    def timed(work: Work | None) -> Work | None:
        return replace(work, measurement=measurement) if work is not None and work.digest == digest else work

    known = (*state.measurements, (digest, measurement))
    return replace(state, measurements=known, best=timed(state.best), base=timed(state.base))
