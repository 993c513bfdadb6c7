"""`kernel-agent dataset`: list the shipped pairs and prove them again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

dataset = typer.Typer(name="dataset", help="The proven forward/backward pairs.", no_args_is_help=True)


@dataset.command("list")
def list_pairs(family: Annotated[str, typer.Option(help="Only this family.")] = "") -> None:
    """List the shipped pairs with their techniques."""
    from kernel_agent.cli.tables import Listing
    from kernel_agent.data import pairs_root
    from kernel_agent.pairs.meta import read_meta

    folding = frozenset({"gradients", "techniques"})
    table = Listing("kernel pairs", ("family", "pair", "gradients", "techniques"), folding)
    for path in pair_files([pairs_root()]):
        meta = read_meta(path.read_text())
        if family in ("", meta.family):
            table.add(meta.family, meta.slug, ", ".join(meta.grads), ", ".join(meta.techniques))
    if not table.rows:
        raise InputError(f"no pair belongs to the family {family!r}", remedy="kernel-agent dataset list shows all")
    table.show(out())


@dataset.command("check")
def check_pairs(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Pair files or folders; default: all shipped pairs.")
    ] = None,
) -> None:
    """Lint pair files and put each through the gate."""
    from rich.progress import Progress

    from kernel_agent.cli.check import gate_file, truths_of
    from kernel_agent.data import pairs_root
    from kernel_agent.pairs.lint import lint
    from kernel_agent.sandbox import Sandbox

    files = pair_files(paths or [pairs_root()])
    red = 0
    with Sandbox() as sandbox, Progress(console=err()) as progress:
        task = progress.add_task("pairs", total=len(files))
        for path in files:
            complaints = [str(complaint) for complaint in lint(path)]
            verdict = gate_file(truths_of(path, sandbox))
            good = verdict.green and not complaints
            red += not good
            progress.console.print(
                f"{verdict.status.value:<16} {path.parent.name}/{path.stem}  {verdict.message}",
                markup=False,
                soft_wrap=True,
            )
            for complaint in complaints:
                progress.console.print(f"{'LINT':<16} {complaint}", markup=False, soft_wrap=True)
            progress.advance(task)
    err().print(f"{len(files) - red} of {len(files)} pairs are green")
    raise typer.Exit(int(ExitCode.RED if red else ExitCode.OK))


def pair_files(paths: list[Path]) -> list[Path]:
    """Pair files named or found below the folders named, sorted. Raises `InputError` when there is none."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(
                "there is no such file or folder", path=path, remedy="name a pair file or a folder of them"
            )
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    if not files:
        raise InputError("no pair files here", path=paths[0], remedy="pair files lie in <family>/<slug>.py")
    return files
