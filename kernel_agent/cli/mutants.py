"""What `kernel-agent check --mutants` shows: a bar on the way, a table by class, the score, and every survivor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_agent.cli.streams import err, out

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_agent.gate.mutants.records import MutantResult, MutationReport
    from kernel_agent.oracle import Truths


def judge_mutants(truths: Truths, count: int) -> MutationReport:
    """Judge the mutants of a pair that is green, at most `count` of each class, with a bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kernel_agent.bench.faithful import FaithfulTier
    from kernel_agent.gate.mutants.judge import mutation_report

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        task = progress.add_task("mutants", total=None)

        def on_mutant(result: MutantResult, done: int, planned: int) -> None:
            progress.update(task, completed=done, total=planned, description=f"mutants: {result.mutator}")

        return mutation_report(truths, count=count, on_mutant=on_mutant, rounding=FaithfulTier(truths))


def keep_mutants(report: MutationReport, folder: Path) -> None:
    """Write the record, and a diff for every survivor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutants.json").write_text(report.model_dump_json(indent=1) + "\n")
    for number, survivor in enumerate(report.survivors, 1):
        name = f"{number:03}-{survivor.mutator.replace(' ', '-')}.diff"
        head = f"# {survivor.mutator}, {survivor.mutant}\n# differs at {survivor.case}\n"
        (folder / name).write_text(f"{head}{survivor.diff}\n")


def render_mutants(report: MutationReport) -> None:
    """The table, the score, why a mutant counts as no mistake, and the survivors with their diffs."""
    from rich.text import Text

    from kernel_agent.gate.mutants.records import Outcome

    out().print(mutants_table(report))
    out().print(Text(f"mutants: {report.tally.words}"))
    for outcome in (Outcome.EQUIVALENT, Outcome.ROUNDING):
        for one in report.of(outcome):
            out().print(
                Text(f"{outcome.value}: {one.mutator}, {one.mutant}: {one.reason}", style="dim"), soft_wrap=True
            )
    for note in report.notes:
        out().print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    for survivor in report.survivors:
        out().print(Text(f"survived: {survivor.mutator}, {survivor.mutant}", style="red"), soft_wrap=True)
        out().print(Text(f"  differs at {survivor.case}"), soft_wrap=True)
        out().print(Text(survivor.diff), soft_wrap=True)


def mutants_table(report: MutationReport) -> Table:
    """Counts by class of mistakes and outcome."""
    from rich.table import Column, Table

    from kernel_agent.gate.mutants.records import Outcome

    table = Table(Column("mutants", no_wrap=True), *(outcome.value for outcome in Outcome), box=None)
    for name in dict.fromkeys(result.mutator for result in report.results):
        here = Counter(result.outcome for result in report.results if result.mutator == name)
        table.add_row(name, *(str(here[outcome] or "") for outcome in Outcome))
    return table
