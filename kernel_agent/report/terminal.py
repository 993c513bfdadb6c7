"""Live progress of a run on stderr: a line for what happened, and below them one moving line for what is going on."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status as Spinner
from rich.text import Text

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry
from kernel_agent.agent.explain import headline
from kernel_agent.agent.skeleton import gradient_name
from kernel_agent.agent.speedwords import headline_time
from kernel_agent.gate.mutants.records import MutantResult
from kernel_agent.gate.verdict import CaseResult, Status, Verdict
from kernel_agent.machine import NO_GPU
from kernel_agent.models.protocol import Notice, UsageKind
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.report.paragraphs import derived_line, drafts_line, gate_line, source_words
from kernel_agent.report.trace import NUMBER


class TerminalProgress:
    """An observer that prints to a console. Without a terminal only the lines are printed, nothing moves."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        """`verbose`: streamed text and every case are printed as well."""
        self._console = console
        self._verbose = verbose
        self._spinner = Spinner("", console=console)
        self._arrived = 0.0

    def __enter__(self) -> TerminalProgress:
        if self._console.is_terminal:
            self._spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.stop()

    def on_event(self, entry: Entry) -> None:
        """Print the event's line and say what comes next."""
        line = event_line(entry.event)
        if line is not None:
            self._console.print(line, soft_wrap=True)
        self._arrived = 0.0
        self._say(_next(entry.event))

    def on_text(self, piece: str) -> None:
        """Count what streams in; the count is estimated as providers tell it only at the end."""
        self._arrived += estimate_tokens(piece)
        self._say(f"the reply is coming in: about {self._arrived:,.0f} tokens")
        if self._verbose:
            self._console.print(Text(piece, style="dim"), end="", soft_wrap=True)

    def on_case(self, case: CaseResult, done: int, planned: int) -> None:
        """Count cases."""
        self._say(f"checking: case {done} of {planned}")
        if self._verbose:
            style = "green" if case.status is Status.GREEN else "red"
            self._console.print(Text.assemble("    ", (case.status.value, style), f"  {case.case}"), soft_wrap=True)

    def on_variant(self, change: str, done: int, planned: int) -> None:
        """Count variants."""
        self._say(f"tuning: variant {done} of {planned}, {change}" if planned else f"tuning: {change}")
        if self._verbose:
            self._console.print(Text(f"    {change}", style="dim"), soft_wrap=True)

    def on_mutant(self, mutant: MutantResult, done: int, planned: int) -> None:
        """Count mutants."""
        self._say(f"trying the gate: mutant {done} of {planned}, {mutant.mutator}")
        if self._verbose:
            self._console.print(Text(f"    {mutant.outcome.value}  {mutant.mutator}", style="dim"), soft_wrap=True)

    def on_notice(self, notice: Notice) -> None:
        """Print what the model says beside its reply."""
        self._console.print(Text(f"  {notice.text}", style="yellow"), soft_wrap=True)

    def _say(self, text: str) -> None:
        self._spinner.update(text)


def event_line(event: ev.Event) -> Text | None:
    """One line for an event, or None for one that needs no line."""
    match event:
        case ev.RunStarted():
            return Text(f"run {event.run_id}: {source_words(event)}, because {event.backend_why}")
        case ev.SpecDescribed():
            return Text(f"forward {event.spec.facts.stub}: gradients of {', '.join(event.spec.grads)} are wanted")
        case ev.PhaseStarted():
            return Text(f"phase {NUMBER[event.phase]} {event.phase.value}: {event.line}", style="bold")
        case ev.PhaseSkipped():
            return Text(f"phase {NUMBER[event.phase]} {event.phase.value}: skipped, {event.line}", style="bold")
        case ev.PhaseEnded():
            return Text(f"  {event.line}")
        case ev.TruthCrossChecked():
            return Text(f"  {event.line}", style="" if event.passed else "red")
        case ev.GateTried():
            return Text(f"  {gate_line(event)}", style="red" if event.tally.survived else "")
        case ev.PairsRetrieved():
            return _pairs_line(event)
        case ev.Derived():
            return Text(f"  {derived_line(event)}", style="yellow" if event.reason else "")
        case ev.Asked():
            after = f" after {event.anchor}" if event.anchor else ""
            free = ", not counted" if event.free else ""
            tokens = f"about {event.estimated_input:,} tokens"
            return Text(f"  ask {event.number} ({event.prompt.value}{after}{free}): {tokens}")
        case ev.Replied():
            use, cost = event.reply.usage, event.reply.cost_usd
            price = "" if cost is None else f", ${cost:.4f}"
            about = "about " if use.kind is UsageKind.ESTIMATED else ""
            return Text(f"  reply {event.number}: {about}{use.output:,} tokens{price}, {event.reply.latency_s:.1f} s")
        case ev.Judged():
            return Text("  ").append_text(verdict_text(event.verdict))
        case ev.Confirmed():
            return Text("  on this GPU: ").append_text(verdict_text(event.verdict))
        case ev.Measured():
            return Text(f"  {headline_time(event.measurement)}")
        case ev.SnapshotKept():
            return Text(f"  kept: {event.line}", style="dim")
        case ev.SetAside():
            return Text(f"  set aside: {event.line}", style="dim")
        case ev.RolledBack():
            return Text(f"  rolled back to {event.digest[:16]}", style="yellow")
        case ev.BudgetExhausted():
            return Text(f"  {event.line}", style="yellow")
        case ev.Resumed():
            used = event.machine
            where = "" if used is None else f" on {used.gpu or NO_GPU}, torch {used.versions.torch}"
            dropped = ": a damaged last line of the ledger was dropped" if event.dropped else ""
            return Text(f"resumed{where}{dropped}")
        case ev.ForwardAnalysed():
            count = len(event.facts.launches)
            return Text(f"  {count} launch{'' if count == 1 else 'es'} of the forward read")
        case ev.Planned():
            return _plan_line(event)
        case ev.TechniquesRetrieved():
            found = ", ".join(f"{hit.pair.slug} for {gradient_name(hit.grad)}" for hit in event.hits)
            return Text(f"  pairs by technique: {found or 'none'}")
        case ev.DraftsPlanned():
            return Text(f"  {drafts_line(event)}") if len(event.anchors) > 1 or event.line else None
        case ev.EditFailed():
            return Text(f"  the edits do not apply: {event.line}", style="yellow")
        case ev.Locked():
            return Text(f"  right and locked: {', '.join(map(gradient_name, event.grads))}")
        case ev.Spliced():
            names = (", ".join(map(gradient_name, names)) for names in event.grads)
            return Text(f"  spliced {' with '.join(names)}")
        case ev.TunedEvent():
            return Text(f"  tuned: {event.tuned.line}")
        case ev.CandidateExtracted() | ev.Delivered() | ev.Finished() | ev.Interrupted():
            return None  # the end of a run, whatever it is, is told below its last line


def verdict_text(verdict: Verdict) -> Text:
    """The headline of a verdict in its colour."""
    return Text(headline(verdict), style="green" if verdict.green else "red")


def _plan_line(event: ev.Planned) -> Text:
    if event.plan is None:
        return Text(f"  plan refused: {event.problem.splitlines()[0] if event.problem else ''}", style="yellow")
    how = ", ".join(f"{gradient_name(one.grad)} by {one.reduction.value}" for one in event.plan.gradients)
    return Text(f"  plan after {event.plan.anchor or 'no pair'}: {how}")


def _pairs_line(event: ev.PairsRetrieved) -> Text:
    chosen = ", ".join(f"{pair.family}/{pair.slug}" for pair in event.pairs if pair.chosen)
    line = Text(f"similar pairs: {chosen or 'none'}")
    for term in event.unmatched_excludes:
        line.append(f"\n  no pair matches the excluded term {term!r}", style="yellow")
    if event.notice:
        line.append("\n" + "\n".join(f"  {text}" for text in event.notice.splitlines()), style="yellow")
    return line


def _next(event: ev.Event) -> str:
    match event:
        case ev.PhaseStarted(phase=ev.PhaseName.REFERENCE):
            return "computing exact gradients"
        case ev.PhaseEnded(phase=ev.PhaseName.REFERENCE):
            return "looking for similar pairs"
        case ev.PairsRetrieved():
            return "deriving"
        case ev.Asked():
            return "waiting for the reply"
        case ev.CandidateExtracted():
            return "checking"
    return ""
