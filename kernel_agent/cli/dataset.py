"""`kernel-agent dataset`: list pairs and prove them again; its other commands stand in files of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.dataset_bench import bench_pairs
from kernel_agent.cli.dataset_page import page
from kernel_agent.cli.own_checks import judgeable, own_standings, settle
from kernel_agent.cli.own_pairs import Own, add, harvest, reindex, remove, show
from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from kernel_agent.cli.tables import Listing
    from kernel_agent.collection.checking import Row

dataset = typer.Typer(name="dataset", help="The proven forward/backward pairs, and your own.", no_args_is_help=True)
dataset.command("bench")(bench_pairs)
for command in (add, harvest, show, remove, reindex, page):
    dataset.command()(command)


@dataset.command("list")
def list_pairs(
    family: Annotated[str, typer.Option(help="Only this family.")] = "",
    own: Annotated[bool, typer.Option("--own", help="Only your own pairs.")] = False,
    index: Own = None,
) -> None:
    """List the pairs with their techniques: the shipped ones and your own."""
    from kernel_agent.cli.tables import Listing
    from kernel_agent.collection.pairfiles import pair_files
    from kernel_agent.data import pairs_root
    from kernel_agent.pairs.meta import read_meta

    folding = frozenset({"gradients", "techniques"})
    table = Listing("kernel pairs", ("family", "pair", "gradients", "techniques", "standing"), folding)
    standings = own_standings(index)
    files = [*([] if own else pair_files([pairs_root()])), *standings]
    for path in files:
        if family in ("", path.parent.name):
            meta = read_meta(path.read_text(encoding="utf-8"))
            standing = standings.get(path, "shipped")
            table.add(path.parent.name, path.stem, ", ".join(meta.grads), ", ".join(meta.techniques), standing)
    if not table.rows and own and not family:
        remedy = "kernel-agent dataset add or kernel-agent dataset harvest makes some"
        raise InputError("there are no own pairs yet", remedy=remedy)
    if not table.rows:
        raise InputError(f"no pair belongs to the family {family!r}", remedy="kernel-agent dataset list shows all")
    table.show(out())


@dataset.command("check")
def check_pairs(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Pair files or folders; default: all shipped pairs.")
    ] = None,
    own: Annotated[bool, typer.Option("--own", help="Your own pairs that can be judged.")] = False,
    index: Own = None,
    jobs: Annotated[int, typer.Option(min=0, help="Pairs judged at a time; 0: one per core.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge again what is recorded.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The smallest shape with two cotangents, no compile; not recorded.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Write full verdicts to datasets/results/verdicts.")
    ] = True,
) -> None:
    """Prove pair files: exact gradients, memory, the compile for sm_90, and the rules of the collection.

    A pair whose text and rule are recorded is not judged again. Exit code 1: a pair is red, or could not be judged.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kernel_agent.collection.checking import Options, Outcome, Row
    from kernel_agent.collection.checking import check_pairs as check
    from kernel_agent.collection.pairfiles import pair_files
    from kernel_agent.data import pairs_root

    files = judgeable(index) if own and not paths else pair_files(paths or [pairs_root()])
    options = Options(jobs or len(os.sched_getaffinity(0)), fresh=fresh, quick=quick, record=record)
    bar = (
        TextColumn("pairs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    rows: list[Row] = []
    at_work: list[str] = []
    with Progress(*bar, console=err()) as progress:
        task = progress.add_task("", total=len(files))
        for event in check(files, options):
            if isinstance(event, Row):
                rows.append(event)
                at_work = [name for name in at_work if name != _name(event.path)]
                if not event.recorded or event.outcome is not Outcome.GREEN:
                    progress.console.print(_line(event), markup=False, soft_wrap=True)
                progress.advance(task)
            else:
                at_work.append(_name(event.task.path))
            progress.update(task, description=", ".join(at_work))
    settle(rows)
    _summary(rows).show(out())
    known = sum(row.recorded for row in rows)
    if known:
        err().print(f"{known} of {len(rows)} verdicts were recorded before; --fresh judges them again")
    green = sum(row.outcome is Outcome.GREEN for row in rows)
    err().print(f"{green} of {len(rows)} pairs are green")
    raise typer.Exit(int(ExitCode.OK if green == len(rows) else ExitCode.RED))


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def _line(row: Row) -> str:
    """What a pair's judgement says, with every complaint on a line of its own."""
    verdict = row.verdict
    if verdict is None:
        said = row.problem
    elif verdict.message:
        said = f"{verdict.status.value}: {verdict.message}"
    else:
        said = f"{verdict.right} of {verdict.planned} cases"
        if verdict.kernels:
            said += f"; sm_90: {', '.join(f'{k.kernel} {k.registers} registers' for k in verdict.kernels)}"
    lines = [f"{row.outcome.value:<10} {_name(row.path)}  {said}"]
    problems = verdict.problems if verdict is not None else ()
    return "\n".join([*lines, *(f"{'':<10} {what}" for what in (*problems, *row.complaints))])


def _summary(rows: list[Row]) -> Listing:
    """One row per family."""
    from kernel_agent.cli.tables import Listing
    from kernel_agent.collection.checking import Outcome

    listing = Listing(
        "", ("family", "pairs", "green", "red", "not judged", "recorded before", "cases", "worst error", "processor s")
    )
    for family in sorted({row.path.parent.name for row in rows}):
        own = [row for row in rows if row.path.parent.name == family]
        verdicts = [row.verdict for row in own if row.verdict is not None]
        worst = max((ratio for verdict in verdicts for ratio in verdict.worst.values()), default=0.0)
        listing.add(
            family,
            str(len(own)),
            *(str(sum(row.outcome is outcome for row in own)) for outcome in Outcome),
            str(sum(row.recorded for row in own)),
            str(sum(verdict.right for verdict in verdicts)),
            f"{worst:.0e} of the allowed",
            f"{sum(row.seconds for row in own):.1f}",
        )
    return listing
