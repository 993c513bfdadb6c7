"""The table at the end of a run: each gradient with its cases and worst ratio, then asks, cost and files."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.gate.verdict import Verdict
from kernel_agent.report.terminal import verdict_text


def final_table(run: FinishedRun) -> RenderableType:
    """What a run came to, for a terminal."""
    state = run.state
    parts: list[RenderableType] = []
    if state.best is None:
        parts.append(Text("no reply held code", style="red"))
    else:
        parts += [verdict_text(state.best.verdict), verdict_table(state.best.verdict)]
        parts += [Text(f"note: {note}", style="dim") for note in state.best.verdict.notes]
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("asks", str(len(state.rounds)))
    facts.add_row("tokens", tokens(run))
    facts.add_row("cost", cost(run))
    for name in state.delivered.files if state.delivered else ():
        facts.add_row("file", str(run.folder.product / name))
    facts.add_row("trace", str(run.folder.trace))
    return Group(*parts, facts)


def verdict_table(verdict: Verdict) -> Table:
    """One row per gradient: cases in which it was right, and the worst error as a part of the allowed one."""
    table = Table("gradient", "cases right", "worst error / allowed")
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
    use = run.state.usage
    return f"{use.input:,} in ({use.cached:,} cached), {use.output:,} out ({use.reasoning:,} reasoning)"


def cost(run: FinishedRun) -> str:
    """Dollars of all asks in words."""
    state = run.state
    known = f"${state.cost_usd:.4f}"
    if not state.unpriced:
        return known
    return f"{known} and {state.unpriced} of unknown price" if state.unpriced < len(state.rounds) else "unknown"
