"""The loop of a run: reference, backward, optimize, deliver.

Every step looks at the state, does what is missing, and records the outcome before the next. A run that was killed is
run again from the top: steps whose outcome is in the ledger are passed over, and the first one missing is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kernel_agent.agent import events as ev
from kernel_agent.agent import prompts
from kernel_agent.agent.brief import Brief, make_brief
from kernel_agent.agent.budget import Budget
from kernel_agent.agent.explain import headline
from kernel_agent.agent.ledger import Ledger
from kernel_agent.agent.observer import Observer
from kernel_agent.agent.phases import BACKWARD, OPTIMIZE, REFERENCE, Phase
from kernel_agent.agent.reply import extract
from kernel_agent.agent.runfolder import RunFolder
from kernel_agent.agent.snapshots import Snapshots, render
from kernel_agent.agent.state import Round, RunState, Work, advance, fold
from kernel_agent.agent.tools import Tools
from kernel_agent.bench.records import decide
from kernel_agent.config import Backend, RunConfig
from kernel_agent.deliver.certificate import Provenance
from kernel_agent.errors import KernelAgentError
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.protocol import Model
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.pairs.assemble import assemble, generated_forward
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file

NO_TEXT = "(The reply held no text.)"
"""Stands for an empty reply, so that its file shows that it was received."""

TOLD_ATTEMPTS = 6
"""Earlier attempts that a prompt lists."""


class TruthDoubted(KernelAgentError):
    """Exact gradients and central differences disagree, so nothing could be proven."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end."""

    folder: RunFolder
    state: RunState

    @property
    def outcome(self) -> ev.Outcome:
        """Delivered, or not."""
        return ev.Outcome.NO_GREEN_VERDICT if self.state.finished is None else self.state.finished.outcome


class Orchestrator:
    """One run, from wherever its ledger ends to its end."""

    def __init__(self, folder: RunFolder, ledger: Ledger, tools: Tools, model: Model, observer: Observer) -> None:
        self.folder = folder
        self.ledger = ledger
        self.tools = tools
        self.model = model
        self.observer = observer
        self.state = fold(ledger)
        self.exchange = Exchange(folder.path)
        self.snapshots = Snapshots(folder.snapshots)

    def run(self) -> FinishedRun:
        """Do what is left of the run. Raises `KernelAgentError`s of the rooms; the ledger stays resumable."""
        if self.state.finished is None:
            self._reference()
            self._retrieve()
            self._backward()
            self._optimize()
            self._finish()
        return FinishedRun(self.folder, self.state)

    def record(self, event: ev.Event) -> None:
        """Put an event on disk, then let it change the state, then tell the observer."""
        entry = self.ledger.append(event)
        self.state = advance(self.state, entry.event)
        self.observer.on_event(entry)

    # The phases.

    def _reference(self) -> None:
        if self.state.spec is None:
            facts = read_file(self.folder.source)
            spec = self.tools.describe(
                facts.model_copy(update={"path": self.folder.source.with_stem(self._started.stem)})
            )
            self.record(described(spec))
        if self._begin(REFERENCE):
            if self.state.truth is None:
                self.record(self.tools.cross_check(self._spec))
            if self.state.truth is not None and not self.state.truth.passed:
                raise TruthDoubted(
                    self.state.truth.line,
                    remedy="the forward may jump where it was checked; a `surrogate` can say what is meant",
                )
            self._end(REFERENCE, f"exact gradients of {', '.join(self._spec.grads)} are known")

    def _retrieve(self) -> None:
        if self.state.retrieval is None:
            self.record(self.tools.retrieve(self._spec))

    def _backward(self) -> None:
        if self._begin(BACKWARD):
            while not self.state.green and self._round(BACKWARD):
                pass
            count = len(self.state.rounds)
            asks = f"after {count} ask{'' if count == 1 else 's'}"
            self._end(BACKWARD, f"proven {asks}" if self.state.green else f"not proven {asks}: {self.state.exhausted}")

    def _optimize(self) -> None:
        if OPTIMIZE.name in self.state.over:
            return
        if self.state.best is None or not self.state.green or self.tools.measure is None:
            why = self.tools.unmeasured if self.state.green else "there is no proven backward to make faster"
            self.record(ev.PhaseSkipped(phase=OPTIMIZE.name, line=why))
        elif self._begin(OPTIMIZE):
            self._measure(self.state.best)
            while self._round(OPTIMIZE):
                pass
            self._end(OPTIMIZE, f"the best takes {self._time(self.state.best)}; {self.state.exhausted}")

    def _finish(self) -> None:
        best = self.state.best
        if best is not None and best.verdict.green:
            if self.state.delivered is None:
                candidate = self.snapshots.get(best.digest)
                files = self.tools.deliver(self._spec, candidate, best.verdict, self._provenance(), self.folder.product)
                names = tuple(path.relative_to(self.folder.product).as_posix() for path in files)
                self.record(ev.Delivered(files=names, line=headline(best.verdict)))
            self.record(ev.Finished(outcome=ev.Outcome.DELIVERED, digest=best.digest, line=headline(best.verdict)))
        else:
            none = "no reply held code" if self.state.rounds else f"nothing was asked: {self.state.exhausted}"
            line = none if best is None else f"the best candidate is {headline(best.verdict)}"
            self.record(
                ev.Finished(outcome=ev.Outcome.NO_GREEN_VERDICT, digest=best.digest if best else None, line=line)
            )

    # One round: ask, reply, candidate, verdict, keep or set aside.

    def _round(self, phase: Phase) -> bool:
        """Bring the open round to its end, or make a new one. False when the budget refuses a new one."""
        if not self.state.open and not self._ask(phase):
            return False
        if self._open.reply is None:
            self._receive(self._open)
        if self._open.candidate is None and self._open.verdict is None:
            self._extract(self._open)
        if self._open.verdict is None:
            self._judge(self._open)
        self._settle(self._open)
        return True

    def _ask(self, phase: Phase) -> bool:
        if self.state.exhausted:
            return False
        self._roll_back_if_stuck()
        prompt = self._prompt(phase)
        conversation = prompt.conversation
        estimate = estimate_tokens(conversation.system) + sum(estimate_tokens(turn.text) for turn in conversation.turns)
        refusal = Budget.of(self._config, self.model.name).refusal(self.state, estimate)
        if refusal:
            self.record(ev.BudgetExhausted(line=refusal))
            return False
        number = len(self.state.rounds) + 1
        if not self.exchange.has_reply(number):
            self.exchange.write_ask(number, conversation)
        before = self.state.rounds[-1].conversation if self.state.rounds else None
        opening = conversation.turns[0].text
        self.record(
            ev.Asked(
                number=number,
                phase=phase.name,
                prompt=prompt.name,
                system=None if before is not None and before.system == conversation.system else conversation.system,
                opening=None if before is not None and before.turns[0].text == opening else opening,
                turns=conversation.turns[1:],
                digest=prompt.digest,
                estimated_input=estimate,
            )
        )
        return True

    def _receive(self, open_round: Round) -> None:
        number = open_round.number
        facts = self.exchange.facts_path(number).is_file()
        # Where a person writes the replies, a text without facts may still be growing.
        if self.exchange.has_reply(number) and (facts or self._config.backend is not Backend.MANUAL):
            # It was received, and paid for, before the run was killed.
            reply = self.exchange.read_reply(number, model=self.model.name)
            if not facts:
                self.exchange.write_reply(number, reply)
        else:
            reply = self.model.ask(open_round.conversation, on_text=self.observer.on_text)
            reply = reply if reply.text.strip() else reply.model_copy(update={"text": NO_TEXT})
            self.exchange.write_reply(number, reply)
        self.record(ev.Replied(number=number, reply=reply))

    def _extract(self, open_round: Round) -> None:
        assert open_round.reply is not None
        reply, number = open_round.reply, open_round.number
        found = extract(
            reply.text,
            given_forward=self._given_forward,
            freeze_forward=self._config.freeze_forward,
            stop=reply.stop,
        )
        if found.candidate is not None:
            digest = self.snapshots.put(found.candidate)
            has_forward = found.candidate.forward is not None
            self.record(ev.CandidateExtracted(number=number, digest=digest, has_forward=has_forward, notes=found.notes))
        elif found.refusal is not None:
            self.record(ev.Judged(number=number, digest=None, verdict=found.refusal))

    def _judge(self, open_round: Round) -> None:
        assert open_round.candidate is not None
        digest = open_round.candidate
        same = self.state.judged(digest)
        if same is not None:
            self.record(ev.Judged(number=open_round.number, digest=digest, verdict=same.verdict, same_as=same.number))
            return
        verdict = self.tools.check(self._spec, self._file(digest), self.observer.on_case)
        self.record(ev.Judged(number=open_round.number, digest=digest, verdict=verdict))

    def _settle(self, open_round: Round) -> None:
        work, best = next(iter(open_round.works), None), self.state.best
        number, digest, verdict = open_round.number, open_round.candidate, open_round.verdict
        assert verdict is not None
        if digest is None or work is None:
            self.record(ev.SetAside(number=number, digest=None, line="the reply holds no candidate"))
            return
        if open_round.phase is OPTIMIZE.name and verdict.green:
            work = self._measure(work)
        line = self._progress(work, best, open_round.phase)
        if line:
            self.record(ev.SnapshotKept(number=number, digest=digest, line=line))
        else:
            self.record(ev.SetAside(number=number, digest=digest, line=self._no_progress(work, best)))

    # What the steps need.

    def _progress(self, work: Work, best: Work | None, phase: ev.PhaseName) -> str:
        """In what a candidate is better than the best; empty when it is not."""
        if best is None:
            return "the first candidate"
        if phase is BACKWARD.name:
            return f"better than that of ask {best.number}" if work.verdict.rank > best.verdict.rank else ""
        if not work.verdict.green or work.measurement is None or best.measurement is None:
            return ""
        decision = decide(best.measurement, work.measurement, self._config.min_rel_impr)
        return decision.line if decision.kept else ""

    def _no_progress(self, work: Work, best: Work | None) -> str:
        if best is not None and work.verdict.green and best.verdict.green:
            return f"{self._time(work)}, not enough less than {self._time(best)} of ask {best.number}"
        return f"no better than that of ask {best.number if best else 0}"

    def _roll_back_if_stuck(self) -> None:
        best, base = self.state.best, self.state.base
        if best is None or base is None:
            return
        slower = base.verdict.green and base.digest != best.digest
        if slower or self.state.stale >= self._config.patience:
            self.record(ev.RolledBack(digest=best.digest, asks_without_progress=self.state.stale))

    def _prompt(self, phase: Phase) -> prompts.Prompt:
        state, base = self.state, self.state.base
        last = state.rounds[-1] if state.rounds else None
        if last is None:
            return prompts.draft(self._brief)
        code = "" if base is None else render(self.snapshots.get(base.digest))
        told = self._told()
        if base is None or (last.candidate is None and not state.rolled_back):
            answer = prompts.fenced(code) if code else (last.reply.text if last.reply else "")
            problem = last.verdict.message if last.verdict else ""
            return prompts.no_code(self._brief, answer, problem, base.verdict if base else None, told)
        if phase is OPTIMIZE and base.verdict.green:
            return prompts.optimize(self._brief, code, base.measurement, self._config.min_rel_impr, told)
        return prompts.repair(self._brief, code, self._file(base.digest), base.verdict, told)

    def _told(self) -> prompts.Progressing:
        state = self.state
        since = state.best.number if state.best is not None and state.rolled_back else 0
        judged = [(r.number, r.verdict) for r in state.rounds if r.verdict is not None and r.number > since]
        attempts = tuple(f"reply {number}: {headline(verdict)}" for number, verdict in judged[-TOLD_ATTEMPTS:])
        return prompts.Progressing(attempts, self._config.max_iters - len(state.rounds), state.rolled_back)

    def _measure(self, work: Work) -> Work:
        assert self.tools.measure is not None
        if self.state.measured(work.digest) is None:
            measurement = self.tools.measure(self._spec, self.snapshots.get(work.digest))
            self.record(ev.Measured(digest=work.digest, measurement=measurement))
        return Work(work.digest, work.number, work.verdict, self.state.measured(work.digest))

    def _time(self, work: Work | None) -> str:
        known = None if work is None else self.state.measured(work.digest)
        return "unknown time" if known is None else f"{known.geomean_us:.1f} us"

    def _provenance(self) -> Provenance:
        state, started = self.state, self._started
        return Provenance(
            backend=started.backend.value,
            model=started.model,
            asks=len(state.rounds),
            input_tokens=state.usage.input,
            output_tokens=state.usage.output,
            cost_usd=None if state.unpriced else state.cost_usd,
            run_id=started.run_id,
        )

    def _file(self, digest: str) -> str:
        return assemble(self._spec, self.snapshots.get(digest))

    def _begin(self, phase: Phase) -> bool:
        """Start a phase unless it was; False when it is over."""
        if phase.name not in self.state.begun:
            self.record(ev.PhaseStarted(phase=phase.name, line=phase.purpose))
        return phase.name not in self.state.over

    def _end(self, phase: Phase, line: str) -> None:
        self.record(ev.PhaseEnded(phase=phase.name, line=line))

    @cached_property
    def _given_forward(self) -> str:
        facts = self._spec.facts
        return split_sections(facts.source).forward if facts.is_pair else generated_forward(self._spec)

    @cached_property
    def _brief(self) -> Brief:
        pairs = () if self.state.retrieval is None else tuple(p for p in self.state.retrieval.pairs if p.chosen)
        config = self._config
        return make_brief(self._spec, pairs, freeze_forward=config.freeze_forward, max_asks=config.max_iters)

    @property
    def _open(self) -> Round:
        return self.state.open[0]

    @property
    def _spec(self) -> KernelSpec:
        assert self.state.spec is not None
        return self.state.spec

    @property
    def _config(self) -> RunConfig:
        assert self.state.config is not None
        return self.state.config

    @property
    def _started(self) -> ev.RunStarted:
        assert self.state.started is not None
        return self.state.started


def described(spec: KernelSpec) -> ev.SpecDescribed:
    """The event of a described spec, without the folder that its file lies in."""
    facts = spec.facts.model_copy(update={"path": Path(spec.facts.path.name)})
    return ev.SpecDescribed(spec=spec.model_copy(update={"facts": facts}))
