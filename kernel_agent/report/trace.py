"""`trace.md`: a ledger as plain chronological text. Prompts, reasoning, tokens, checks and rollbacks; no number dumps.

It depends on the ledger alone, so the same ledger always gives the same text. What was sent and answered is quoted with
`> `; everything else is the tool's own words. The first ask is shown whole, later ones by what is new in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry, PhaseName
from kernel_agent.agent.explain import cases_in_words, gradients_in_words, headline
from kernel_agent.agent.snapshots import parse
from kernel_agent.gate.verdict import Verdict
from kernel_agent.machine import Machine
from kernel_agent.models.protocol import Reply, Role, Turn
from kernel_agent.models.usage import usage_words
from kernel_agent.report.paragraphs import (
    derived_paragraphs,
    diagnosis_paragraphs,
    drafts_line,
    forward_paragraphs,
    gate_line,
    locked_line,
    plan_paragraphs,
    source_words,
    spliced_line,
    technique_paragraphs,
    time_paragraphs,
    tuning_paragraphs,
)

NUMBER = {PhaseName.REFERENCE: 1, PhaseName.BACKWARD: 2, PhaseName.OPTIMIZE: 3}
"""Phases as readers count them."""

FENCE = "```python\n"


def render_trace(entries: Iterable[Entry]) -> str:
    """The text of a ledger. Works on ledgers of unfinished runs too."""
    parts: list[str] = []
    start: datetime | None = None
    shown: set[str] = set()
    machine: Machine | None = None
    for entry in entries:
        at = datetime.fromisoformat(entry.at.replace("Z", "+00:00"))
        start = start or at
        when = f"after {_duration((at - start).total_seconds())}"
        parts += _event(entry.event, when, shown)
        if isinstance(entry.event, ev.RunStarted):
            machine = Machine(gpu=entry.event.gpu, versions=entry.event.versions)
        elif isinstance(entry.event, ev.Resumed) and entry.event.machine is not None:
            parts += _moved(entry.event.machine, machine)
            machine = entry.event.machine
        if isinstance(entry.event, ev.CandidateExtracted):
            shown.add(entry.event.digest)
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _event(event: ev.Event, when: str, shown: set[str]) -> list[str]:
    """The paragraphs of one event. `shown` holds the candidates whose code stands above it."""
    match event:
        case ev.RunStarted():
            return _started(event)
        case ev.SpecDescribed():
            return _spec(event)
        case ev.PhaseStarted():
            return [f"## Phase {NUMBER[event.phase]}, {event.phase.value}: {event.line}"]
        case ev.PhaseSkipped():
            return [f"## Phase {NUMBER[event.phase]}, {event.phase.value}: skipped", _sentence(event.line)]
        case ev.PhaseEnded():
            return [f"End of phase {NUMBER[event.phase]}, {when}: {event.line}."]
        case ev.TruthCrossChecked():
            result = "passed" if event.passed else "FAILED"
            return [f"Cross-check of the exact gradients {result}: {_sentence(event.line)}"]
        case ev.GateTried():
            line = gate_line(event)
            return [f"{line[0].upper()}{line[1:]}."]
        case ev.PairsRetrieved():
            return _pairs(event)
        case ev.Derived():
            return derived_paragraphs(event)
        case ev.Asked():
            return _ask(event, when, shown)
        case ev.ForwardAnalysed():
            return forward_paragraphs(event.facts)
        case ev.Planned():
            return plan_paragraphs(event)
        case ev.TechniquesRetrieved():
            return technique_paragraphs(event)
        case ev.DraftsPlanned():
            return [] if event.anchors == (None,) and not event.line else [drafts_line(event)]
        case ev.EditFailed():
            return [f"The edits of reply {event.number} do not apply: {_sentence(event.line)}"]
        case ev.Locked():
            return [locked_line(event)]
        case ev.Spliced():
            return [spliced_line(event)]
        case ev.TunedEvent():
            return tuning_paragraphs(event)
        case ev.Replied():
            return _reply(event.number, event.reply, when)
        case ev.CandidateExtracted():
            sections = "a forward and a backward section" if event.has_forward else "a backward section"
            held = f"{_count(event.edits, 'edit')} of the candidate shown to it" if event.edits else sections
            notes = "".join(f"\n- {note}" for note in event.notes)
            return [f"Reply {event.number} holds {held}: candidate `{event.digest[:16]}`.{notes}"]
        case ev.Judged():
            return _verdict(event, when)
        case ev.Confirmed():
            said = headline(event.verdict)
            head = f"### Check of `{event.digest[:16]}` on this machine's GPU {when}: {said}"
            return [head, *verdict_lines(event.verdict, said=said)]
        case ev.Measured():
            return [f"### Time of `{event.digest[:16]}` {when}", *time_paragraphs(event.measurement)]
        case ev.SnapshotKept():
            return [f"Kept as the best candidate, `{event.digest[:16]}`: {event.line}."]
        case ev.SetAside():
            return [f"Set aside: {_sentence(event.line)}"]
        case ev.RolledBack():
            count = event.asks_without_progress
            why = f"{_count(count, 'ask')} without progress" if count else "the last candidate is not faster"
            return [f"### Rolled back to `{event.digest[:16]}`: {why}"]
        case ev.BudgetExhausted():
            return [f"No further ask: {_sentence(event.line)}"]
        case ev.Delivered():
            return ["## Delivered", "\n".join(f"- {name}" for name in event.files)]
        case ev.Interrupted():
            return [f"### Interrupted {when}", _sentence(event.line)]
        case ev.Resumed():
            dropped = f"A damaged last line of the ledger was dropped ({len(event.dropped)} characters)."
            return ["### Resumed", dropped if event.dropped else ""]
        case ev.Finished():
            return [f"## Result {when}: {event.outcome.value}", _sentence(event.line)]


def _started(event: ev.RunStarted) -> list[str]:
    used = event.versions
    return [
        f"# {event.stem}: run {event.run_id}",
        f"Backwards are written by {source_words(event)}: {event.backend_why}.",
        f"kernel-agent {used.kernel_agent}, Python {used.python}, torch {used.torch}, triton {used.triton}"
        + (f", {event.gpu}." if event.gpu else "."),
    ]


def _moved(machine: Machine, before: Machine | None) -> list[str]:
    """What is different from where the run was worked on before."""
    if before is None or not machine.unlike(before):
        return []
    kept = "" if machine.times_as(before) else " What was timed before is not compared with what is timed from here on."
    return [f"From here on: {', '.join(machine.unlike(before))}.{kept}"]


def _spec(event: ev.SpecDescribed) -> list[str]:
    spec = event.spec
    kernels = ", ".join(f"`{name}`" for name in dict.fromkeys(spec.launches))
    outputs = ", ".join(f"{facts.name}{'' if facts.needs_grad else ' (no gradient)'}" for facts in spec.outputs)
    return [
        f"The forward `{spec.facts.stub}` in {spec.facts.path.name} launches {kernels}, returns {outputs}; "
        f"wanted are the gradients of {', '.join(spec.grads)} on {_count(len(spec.sweep), 'shape')}."
    ]


def _pairs(event: ev.PairsRetrieved) -> list[str]:
    lines = []
    for place, pair in enumerate(event.pairs, 1):
        likeness = "" if pair.similarity is None else f", similarity {pair.similarity:.2f}"
        outcome = "shown" if pair.chosen else "not shown"
        why = f" ({pair.reason})" if pair.reason else ""
        standing = f" [{pair.standing}]" if pair.standing else ""
        lines.append(f"{place}. {pair.family}/{pair.slug}{standing}: score {pair.score:.4f}{likeness}; {outcome}{why}")
    unmatched = [f"No pair matches the excluded term {term!r}." for term in event.unmatched_excludes]
    return ["## Retrieval", event.notice, *unmatched, "\n".join(lines)]


def _ask(event: ev.Asked, when: str, shown: set[str]) -> list[str]:
    kind = event.prompt.value + (f" after {event.anchor}" if event.anchor else "")
    kind += ", not counted" if event.free else ""
    parts = [f"### Ask {event.number} ({kind}) {when}, about {event.estimated_input:,} tokens"]
    if event.system is not None:
        parts += ["System:", _quoted(event.system)]
    if event.opening is not None:
        parts += ["User:", _quoted(event.opening)]
    elif event.turns:
        parts.append("The system text and the first turn are those of the ask before; after them:")
    return parts + [text for turn in event.turns for text in _turn(turn, shown)]


def _turn(turn: Turn, shown: set[str]) -> list[str]:
    digest = parse(turn.text.removeprefix(FENCE).removesuffix("```")).digest if turn.text.startswith(FENCE) else ""
    if turn.role is Role.ASSISTANT and digest in shown:
        return [f"Assistant: the candidate `{digest[:16]}`, as shown above."]
    return [f"{turn.role.value.capitalize()}:", _quoted(turn.text)]


def _reply(number: int, reply: Reply, when: str) -> list[str]:
    tokens = usage_words(reply.usage)
    cost = "cost unknown" if reply.cost_usd is None else f"${reply.cost_usd:.4f}"
    parts = [
        f"### Reply {number} {when}",
        f"{reply.model}: {tokens}, {cost}, {_duration(reply.latency_s)}; ended: {reply.stop.value}.",
        "\n".join(f"- {notice.text}" for notice in reply.notices),
    ]
    if reply.reasoning:
        parts += ["Reasoning:", _quoted(reply.reasoning)]
    return [*parts, "Text:", _quoted(reply.text)]


def _verdict(event: ev.Judged, when: str) -> list[str]:
    verdict = event.verdict
    parts = [f"### Check {event.number} {when}: {headline(verdict)}"]
    if event.same_as is not None:
        known = f"as in reply {event.same_as}" if event.same_as else "that was derived"
        parts.append(f"The same candidate {known}; its verdict holds.")
        return parts
    return parts + verdict_lines(verdict, said=headline(verdict))


def verdict_lines(verdict: Verdict, said: str = "") -> list[str]:
    """A verdict as paragraphs: what is wrong, unless `said` has it; which gradients are right; cases passed."""
    parts = [] if verdict.message in said or verdict.green else [verdict.message]
    facts = (
        [f"Cases: {cases_in_words(verdict)}, {_duration(verdict.seconds)}, tier {verdict.tier}"]
        if verdict.cases
        else []
    )
    facts += gradients_in_words(verdict.cases)
    if verdict.forward is not None and (verdict.forward.lines_changed or verdict.forward.extra_saved_bytes):
        change = verdict.forward
        lines = _count(change.lines_changed, "line")
        facts.append(f"own forward: {lines} changed, {change.extra_saved_bytes:,} more bytes saved")
    facts += verdict.notes
    parts.append("\n".join(f"- {fact}" for fact in facts))
    parts += diagnosis_paragraphs(verdict)
    if verdict.details:
        parts.append(_quoted(verdict.details))
    return parts


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip("\n").split("\n"))


def _sentence(line: str) -> str:
    return line if line.endswith((".", "!", "?")) or not line else line + "."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
