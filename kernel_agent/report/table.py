"""The table at the end of a run: each gradient with its cases and worst ratio, then time, asks, cost and files."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kernel_agent.agent.gatetried import tally_of
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.agent.speedwords import baseline_words, headline_time
from kernel_agent.gate.verdict import Verdict
from kernel_agent.models.usage import usage_words
from kernel_agent.report.terminal import verdict_text


def final_table(run: FinishedRun) -> RenderableType:
    """What a run came to, for a terminal."""
    state = run.state
    parts: list[RenderableType] = []
    if state.best is None:
        parts.append(Text(reason(run), style="red"))
    else:
        parts += [verdict_text(state.best.verdict), verdict_table(state.best.verdict)]
        parts += [Text(f"note: {note}", style="dim") for note in state.best.verdict.notes]
        if not state.best.verdict.green and state.exhausted:
            parts.append(Text(state.exhausted, style="red"))
    if state.best is not None and state.best.measurement is not None:
        time = state.best.measurement
        parts += [_fact("time", headline_time(time)), *(_fact("", words) for words in baseline_words(time))]
    mutants = None if state.best is None else tally_of(state.tried, state.best.digest)
    if mutants is not None:
        parts.append(_fact("mutants", mutants.words))
    if state.derived is not None and state.best is not None and state.best.number == 0:
        parts.append(_fact("by", f"the compiler, schedule {', '.join(state.derived.schedules)}"))
    parts += [_fact("asks", str(len(state.rounds))), _fact("tokens", tokens(run)), _fact("cost", cost(run))]
    parts += [
        _fact("file", str(run.folder.product / name)) for name in (state.delivered.files if state.delivered else ())
    ]
    return Group(*parts, _fact("trace", str(run.folder.trace)))


def reason(run: FinishedRun) -> str:
    """One line: why a run ended as it did."""
    state = run.state
    line = state.finished.line if state.finished is not None else "the run did not come to its end"
    if state.green or not state.exhausted:
        return line
    return line if state.exhausted in line else f"{line}; {state.exhausted}"


def _fact(name: str, value: str) -> Text:
    """One line, not a row of a table, which would cut or fold paths where the terminal is narrow."""
    return Text.assemble((f"{name:<8}", "dim"), value)


def verdict_table(verdict: Verdict) -> Table:
    """One row per gradient: cases in which it was right, and the worst error as a part of the allowed one."""
    table = Table(Column("gradient", no_wrap=True), "cases right", "worst error / allowed")
    names = dict.fromkeys(score.grad for case in verdict.cases for score in case.grads)
    for name in names:
        scores = [score for case in verdict.cases for score in case.grads if score.grad == name]
        right = sum(score.passed for score in scores)
        style = "green" if right == len(scores) else "red"
        table.add_row(
            name, Text(f"{right} of {len(scores)}", style=style), f"{max(score.ratio for score in scores):.3g}"
        )
    return table


def tokens(run: FinishedRun) -> str:
    """Tokens of all asks in words."""
    return usage_words(run.state.usage).replace(" tokens in", " in", 1)


def cost(run: FinishedRun) -> str:
    """Dollars of all asks in words."""
    state = run.state
    known = f"${state.cost_usd:.4f}"
    if not state.unpriced:
        return known
    return f"{known} and {state.unpriced} of unknown price" if state.unpriced < len(state.rounds) else "unknown"
