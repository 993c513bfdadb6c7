"""`kernel-agent explain FILE.py`: what a forward loads and stores along which axis, and how its gradients flow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode

if TYPE_CHECKING:
    from kernel_agent.pairs.forward_facts import ForwardFacts, LaunchFacts


def explain(
    file: Annotated[Path, typer.Argument(help="A file with a forward stub, or a pair file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what the kernels of a forward do with memory, and which gradients sum over programs.

    The forward runs once, at a small entry of its SWEEP, in the exact executor: no GPU is needed. Where the file has a
    `reference`, its derivative is written down as a list of assignments.

    [bold]kernel-agent explain examples/layernorm.py[/]\n
    [bold]kernel-agent explain examples/attention.py --json[/]
    """
    from kernel_agent.pairs.userfile import read_file

    source = read_file(file)
    from kernel_agent.oracle import analyse_spec, describe
    from kernel_agent.sandbox import Sandbox

    with Sandbox() as sandbox, err().status(f"reading {file.name}"):
        facts = analyse_spec(describe(source, sandbox), sandbox)
    if as_json:
        print(facts.model_dump_json(indent=2))
    else:
        _show(file, facts)
    raise typer.Exit(int(ExitCode.OK))


def _show(file: Path, facts: ForwardFacts) -> None:
    from rich.text import Text

    title = Text(f"{file.name} forward", style="bold").append(f" at {facts.entry}" if facts.entry else "")
    out().print(title, soft_wrap=True)
    for place, launch in enumerate(facts.launches, 1):
        _show_launch(place, launch)
    _section("gradients across programs", facts.crossing)
    if facts.derivative is not None:
        _section(f"derivative ({facts.derivative.source.value})", facts.derivative.lines)
    for note in facts.notes:
        out().print(Text(f"note: {note}", style="dim"), soft_wrap=True)


def _show_launch(place: int, launch: LaunchFacts) -> None:
    from rich.text import Text

    times = f", {launch.times} times in a row" if launch.times > 1 else ""
    out().print(Text(f"\n{place}. {launch.kernel} grid {launch.grid}{times}", style="bold"), soft_wrap=True)
    for access in launch.accesses:
        line = f" line {access.line}" if access.line else ""
        text = Text(f"  {access.mode.value:<6} ").append(access.argument, style="cyan").append(f"{line}: {access.axes}")
        out().print(text.append("; masked" if access.masked else "", style="dim"), soft_wrap=True)
    for reduction in launch.reductions:
        line = f" line {reduction.line}" if reduction.line else ""
        out().print(Text(f"  {reduction.operation}{line}: over {reduction.axis}"), soft_wrap=True)
    for loop in launch.loops:
        out().print(Text(f"  loop {loop}"), soft_wrap=True)


def _section(title: str, lines: tuple[str, ...]) -> None:
    from rich.text import Text

    if lines:
        out().print(Text(f"\n{title}", style="bold"), soft_wrap=True)
    for line in lines:
        out().print(Text(f"  {line}"), soft_wrap=True)
