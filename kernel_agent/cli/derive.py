"""`kernel-agent derive FILE.py`: write the backward of a forward by the compiler, proven, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from kernel_agent.compiler.derive import Derived
    from kernel_agent.gate.verdict import CaseResult


def derive(
    file: Annotated[Path, typer.Argument(help="A file with a forward stub, or a pair file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Take this schedule alone instead of the best that is proven.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say on stderr which schedule was taken, and why no better one.")
    ] = False,
) -> None:
    """Derive a backward from the kernels of a forward, and prove it.

    The pair file goes to stdout. No model is asked and no GPU is needed.

    [bold]kernel-agent derive examples/swiglu.py[/]\n
    [bold]kernel-agent derive examples/layernorm.py --output layernorm_pair.py --explain[/]
    """
    from kernel_agent.pairs.userfile import read_file

    source = read_file(file)
    if output is not None and output.exists():
        raise InputError(
            "this file exists already and is not overwritten", path=output, remedy="choose another --output"
        )
    from kernel_agent.compiler.derive import derive as derive_pair
    from kernel_agent.compiler.schedule.schedules import SCHEDULES
    from kernel_agent.oracle import describe
    from kernel_agent.sandbox import Sandbox

    if schedule is not None and schedule not in SCHEDULES:
        raise InputError(f"there is no schedule `{schedule}`", remedy=f"Take one of: {', '.join(SCHEDULES)}.")
    with Sandbox() as sandbox, err().status(f"{file.name}: following the stub") as status:

        def on_case(result: CaseResult, done: int, planned: int) -> None:
            status.update(f"{file.name}: case {done} of {planned}, {result.case}")

        schedules = (schedule,) if schedule is not None else ()
        found = derive_pair(describe(source, sandbox), sandbox, schedules=schedules, on_case=on_case)
    if explain:
        _explain(found)
    if output is None:
        print(found.draft.pair, end="")
    else:
        output.write_text(found.draft.pair, encoding="utf-8")
        err().print(f"wrote {output}: {found.verdict.message}; kernel-agent check {output} proves it again")
    raise typer.Exit(int(ExitCode.OK))


def _explain(found: Derived) -> None:
    from rich.text import Text

    taken = ", ".join(dict.fromkeys(found.draft.schedules)) or found.draft.schedule
    err().print(Text(f"schedule: {taken}", style="bold"), soft_wrap=True)
    for line in found.refused:
        err().print(Text(f"not taken: {line}", style="dim"), soft_wrap=True)
    for line in found.draft.remarks:
        err().print(Text(f"remark: {line}", style="dim"), soft_wrap=True)
    err().print(Text(f"{found.verdict.message}, in {found.seconds:.1f} s", style="dim"), soft_wrap=True)
