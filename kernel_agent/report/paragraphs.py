"""Paragraphs of a trace: what the forward does, plans, searches, drafts, splices, diagnoses, times and sweeps."""

from __future__ import annotations

from kernel_agent.agent import events as ev
from kernel_agent.agent.diagnosiswords import matrix_lines, what_lines, where_lines
from kernel_agent.agent.explain import headline
from kernel_agent.agent.skeleton import gradient_name
from kernel_agent.agent.speedwords import headline_time, kernel_table, shape_table
from kernel_agent.bench.records import Measurement
from kernel_agent.config import Backend
from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.forward_facts import ForwardFacts


def forward_paragraphs(facts: ForwardFacts) -> list[str]:
    """The launches, and which gradients sum over programs. Accesses stand in the first ask."""
    launches = "; ".join(f"`{launch.kernel}`, grid {launch.grid}" for launch in facts.launches)
    return [f"The forward's launches were read: {launches}.", bullets(facts.crossing)]


def source_words(event: ev.RunStarted) -> str:
    """Who writes the backwards: `openai (gpt-...)`, and the compiler, which is no model, by its name."""
    return event.backend.value if event.backend is Backend.COMPILER else f"{event.backend.value} ({event.model})"


def gate_line(event: ev.GateTried) -> str:
    """What the gate did to what is wrong, with a sentence for each that it let by."""
    what = "wrong gradients" if event.digest is None else "mutants of this backward"
    through = [f"; let by: {one.mutator}, {one.mutant}, which differs at {one.case}" for one in event.tally.survivors]
    return f"the gate before {what}: {event.tally.words}{''.join(through)}"


def derived_line(event: ev.Derived) -> str:
    """What the compiler made of the forward."""
    if event.reason:
        return f"nothing is derived: {event.reason}"
    if event.digest is None or event.verdict is None:
        return "the compiler has read the adjoint of the forward"
    return f"derived, schedule {', '.join(event.schedules)}: {headline(event.verdict)}"


def derived_paragraphs(event: ev.Derived) -> list[str]:
    """The derived backward: its schedule, what was left as it is, why better schedules were not taken, its verdict."""
    line = derived_line(event)
    head = f"## Derivation\n\n{line[0].upper()}{line[1:].rstrip('.')}, in {event.seconds:.1f} s."
    rows = [f"candidate `{event.digest[:16]}`"] if event.digest else []
    rows += [*event.remarks, *(f"not taken: {text}" for text in event.refused)]
    if event.verdict is not None:
        rows += event.verdict.notes
    return [head, bullets(rows)]


def plan_paragraphs(event: ev.Planned) -> list[str]:
    """A plan gradient by gradient with its prices, or why it is refused."""
    if event.plan is None:
        return [f"The plan of reply {event.number} is refused:", bullets(event.problem.splitlines())]
    rows = []
    for one in event.plan.gradients:
        tags = f" ({', '.join(one.techniques)})" if one.techniques else ""
        rows.append(f"{gradient_name(one.grad)}: {one.owner}; {one.reduction.value}{tags}")
    after = f"after {event.plan.anchor}" if event.plan.anchor else "after no pair"
    extra = [f"saved beyond the given layout: {', '.join(item.name for item in event.plan.extra)}"]
    rows += extra if event.plan.extra else []
    parts = [f"The plan of reply {event.number} holds, {after}:", bullets(rows)]
    if event.prices:
        parts += ["What it costs:", bullets([price.line for price in event.prices])]
    return parts


def technique_paragraphs(event: ev.TechniquesRetrieved) -> list[str]:
    """Which pairs were found for which gradients."""
    wanted = ", ".join(map(gradient_name, event.grads))
    what = f"Pairs by technique{f' for {wanted}' if wanted else ''}"
    if not event.hits:
        return [f"{what}: none."]
    return [
        f"{what}:",
        bullets([f"{gradient_name(hit.grad)}: {hit.pair.slug} ({hit.technique})" for hit in event.hits]),
    ]


def drafts_line(event: ev.DraftsPlanned) -> str:
    """How many drafts are made, and what they follow."""
    count = len(event.anchors)
    if count == 1 and event.anchors[0] is None:
        said = "One draft is asked for"
    else:
        after = ", ".join(anchor or "no pair" for anchor in event.anchors)
        said = f"{count} draft{' is' if count == 1 else 's are'} asked for, after {after}"
    return f"{said}; {event.line}." if event.line else f"{said}."


def locked_line(event: ev.Locked) -> str:
    """Which gradients need no further work."""
    names = ", ".join(map(gradient_name, event.grads))
    return f"Right in every case, and locked: {names} of `{event.digest[:16]}`."


def spliced_line(event: ev.Spliced) -> str:
    """Whose gradients were put together."""
    pieces = zip(event.grads, event.from_digests, strict=True)
    first, second = (f"{', '.join(map(gradient_name, names))} of `{digest[:16]}`" for names, digest in pieces)
    return f"Spliced {first} with {second}: candidate `{event.digest[:16]}`."


def diagnosis_paragraphs(verdict: Verdict) -> list[str]:
    """What is wrong, where, and in which cases."""
    if verdict.diagnosis is None:
        return []
    lines = [*what_lines(verdict.diagnosis, said=verdict.message), *where_lines(verdict.diagnosis)]
    suspect = verdict.diagnosis.suspect
    if suspect is not None:
        lines.append(f"first suspect line: {suspect.line}, {suspect.statement}")
    matrix = "\n".join(matrix_lines(verdict))
    return [*(["Diagnosis:", bullets(lines)] if lines else []), f"```\n{matrix}\n```" if matrix else ""]


def time_paragraphs(measurement: Measurement) -> list[str]:
    """A time with its tables per call and per kernel."""
    versions = f"; {', '.join(measurement.versions)}" if measurement.versions else ""
    parts = [f"{headline_time(measurement)}{versions}.", shape_table(measurement.shapes)]
    if measurement.kernels:
        parts.append(kernel_table(measurement.kernels))
    return [*parts, bullets(measurement.facts)]


def tuning_paragraphs(event: ev.TunedEvent) -> list[str]:
    """What a sweep came to."""
    tuned = event.tuned
    tried = f"{tuned.tried} variant{'' if tuned.tried == 1 else 's'} of `{event.digest[:16]}` tried"
    best = f"; the best is `{tuned.best[:16]}`" if tuned.best else ""
    parts = [f"Launch parameters were swept, {tried}{best}: {tuned.line.rstrip('.')}."]
    return parts if tuned.measurement is None else [*parts, *time_paragraphs(tuned.measurement)]


def bullets(lines: tuple[str, ...] | list[str]) -> str:
    """A list in Markdown; empty for none."""
    return "\n".join(f"- {line}" for line in lines)
