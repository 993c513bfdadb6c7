"""`kernel-agent runs`, `resume` and `trace`: what happened, what is unfinished, and going on with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import InputError

if TYPE_CHECKING:
    from kernel_agent.agent.runfolder import RunFolder

RunArgument = Annotated[str, typer.Argument(help="A run folder, a delivery folder, or a run id below --out.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder that holds deliveries and runs.")]


def runs(
    out_folder: Annotated[Path, typer.Option("--out", help="Folder that holds deliveries and runs.")] = Path(
        "generated"
    ),
) -> None:
    """List the runs below a folder, newest first."""
    from kernel_agent.agent.runs import list_runs
    from kernel_agent.cli.tables import Listing

    columns = ("run", "forward", "source of backwards", "asks", "outcome")
    table = Listing(f"runs in {out_folder}", columns, folding=frozenset({"source of backwards", "outcome"}))
    for run in list_runs(out_folder):
        state = run.state
        unfinished = f"unfinished: kernel-agent resume {run.folder.run_id}"
        table.add(
            run.folder.run_id,
            state.started.stem if state.started else "",
            f"{state.started.backend.value}: {state.started.model}" if state.started else "",
            str(len(state.rounds)),
            unfinished if state.finished is None else state.finished.outcome.value,
        )
    if not table.rows:
        err().print(f"no runs below {out_folder}: start one with kernel-agent --file-path x.py", soft_wrap=True)
        return
    table.show(out())


def trace(run: RunArgument, out_folder: OutOption = Path("generated")) -> None:
    """Show a run readably: prompts, replies, verdicts, rollbacks."""
    from kernel_agent.agent.ledger import read_ledger
    from kernel_agent.report.trace import render_trace

    print(render_trace(read_ledger(find_run(run, out_folder).ledger).entries), end="")


def resume(
    run: RunArgument,
    out_folder: OutOption = Path("generated"),
    max_iters: Annotated[int | None, typer.Option(help="A new limit of asks.")] = None,
    max_cost_usd: Annotated[float | None, typer.Option(help="A new limit of cost.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="A new limit of tokens.")] = None,
    tune_variants: Annotated[int | None, typer.Option(help="A new limit of tuned variants.")] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N from here on. Default: as it was.")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Where the replayed run lies now, if it was moved.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="manual: exit with 4 instead of waiting.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one final record instead of the trace.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show streamed text and every case.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Continue a run after an interrupt or a kill, without asking again for replies that were received."""
    from kernel_agent.cli.options import make_config

    limits = {"max_iters": max_iters, "max_cost_usd": max_cost_usd, "max_tokens": max_tokens, "device": device}
    limits["tune_variants"] = tune_variants
    make_config(file=Path(run), **{name: value for name, value in limits.items() if value is not None})
    folder = find_run(run, out_folder)
    from kernel_agent.agent.runs import Changes
    from kernel_agent.cli import job

    changes = Changes(
        max_iters=max_iters,
        max_tokens=max_tokens,
        max_cost_usd=max_cost_usd,
        tune_variants=tune_variants,
        wait=not no_wait,
        device=device,
        replay=replay,
    )
    job.resume(folder, job.View(as_json=as_json, verbose=verbose, quiet=quiet), changes)


def find_run(run: str, out_folder: Path) -> RunFolder:
    """A run by path, by the folder of its delivery, or by its id. Raises `InputError`."""
    from kernel_agent.agent.runfolder import RunFolder

    path = Path(run)
    if path.exists():
        return RunFolder.open(path)
    folders = (folder for folder in out_folder.glob("*/runs/*") if not folder.is_symlink())
    matches = [folder for folder in folders if folder.name.startswith(run)]
    if len(matches) != 1:
        problem = "no run has this id" if not matches else f"{len(matches)} runs begin with this id"
        raise InputError(f"{problem}: {run}", remedy=f"kernel-agent runs --out {out_folder} lists them")
    return RunFolder.open(matches[0])
