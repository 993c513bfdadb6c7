"""`Desk`: what every step of a run has at hand, and the one way to change where the run stands: recording an event."""

from __future__ import annotations

from functools import cached_property

from kernel_agent.agent import events as ev
from kernel_agent.agent.brief import Brief, make_brief
from kernel_agent.agent.budget import Budget
from kernel_agent.agent.ledger import Ledger
from kernel_agent.agent.observer import Observer
from kernel_agent.agent.phases import Phase
from kernel_agent.agent.runfolder import RunFolder
from kernel_agent.agent.snapshots import Snapshots
from kernel_agent.agent.state import advance, fold
from kernel_agent.agent.tools import Tools
from kernel_agent.config import RunConfig
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.protocol import Model
from kernel_agent.pairs.assemble import assemble, generated_forward
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import KernelSpec


class Desk:
    """A run at work."""

    def __init__(self, folder: RunFolder, ledger: Ledger, tools: Tools, model: Model, observer: Observer) -> None:
        self.folder = folder
        self.ledger = ledger
        self.tools = tools
        self.model = model
        self.observer = observer
        self.state = fold(ledger)
        self.exchange = Exchange(folder.path)
        self.snapshots = Snapshots(folder.snapshots)

    def record(self, event: ev.Event) -> None:
        """Put an event on disk, then let it change the state, then tell the observer."""
        entry = self.ledger.append(event)
        self.state = advance(self.state, entry.event)
        self.observer.on_event(entry)

    def begin(self, phase: Phase) -> bool:
        """Start a phase unless it was; False when it is over."""
        if phase.name in self.state.over:
            return False
        if phase.name not in self.state.begun:
            self.record(ev.PhaseStarted(phase=phase.name, line=phase.purpose))
        return True

    def end(self, phase: Phase, line: str) -> None:
        """End a phase; `line` says what came of it."""
        self.record(ev.PhaseEnded(phase=phase.name, line=line))

    def file(self, digest: str) -> str:
        """The whole pair file of a candidate."""
        return assemble(self.spec, self.snapshots.get(digest))

    @property
    def spec(self) -> KernelSpec:
        """The forward, which the first step describes."""
        assert self.state.spec is not None
        return self.state.spec

    @property
    def config(self) -> RunConfig:
        """The configuration in force."""
        assert self.state.config is not None
        return self.state.config

    @property
    def started(self) -> ev.RunStarted:
        """The first event."""
        assert self.state.started is not None
        return self.state.started

    @property
    def budget(self) -> Budget:
        """What the run may use."""
        return Budget.of(self.config, self.model.name)

    @property
    def pairs(self) -> tuple[ev.RetrievedPair, ...]:
        """The pairs that are shown, best first."""
        return () if self.state.retrieval is None else tuple(p for p in self.state.retrieval.pairs if p.chosen)

    @cached_property
    def given_forward(self) -> str:
        """The forward section that is used unless a candidate brings its own."""
        facts = self.spec.facts
        return split_sections(facts.source).forward if facts.is_pair else generated_forward(self.spec)

    @cached_property
    def brief(self) -> Brief:
        """What a model is told of the task; wanted only after the search for pairs, and the same in every ask."""
        return make_brief(
            self.spec,
            self.pairs,
            freeze_forward=self.config.freeze_forward,
            max_asks=self.config.max_iters,
            facts=self.state.facts,
            derived=self.state.derived,
        )
