"""`kernel-agent check PAIR.py`: put any pair file through the gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel_agent.gate.verdict import CaseResult, Verdict
    from kernel_agent.sandbox import Sandbox

    OnCase = Callable[[CaseResult, int, int], None]


def check(
    pair: Annotated[Path, typer.Argument(help="A pair file: a dataset entry or a delivered backward.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Prove the backward of a pair file against its own forward."""
    from kernel_agent.sandbox import Sandbox

    with Sandbox() as sandbox, err().status(f"reading {pair.name}") as status:

        def on_case(result: CaseResult, done: int, planned: int) -> None:
            status.update(f"{pair.name}: case {done} of {planned}, {result.case}")

        verdict = gate_file(pair, sandbox, on_case)
    if as_json:
        print(verdict.model_dump_json(indent=2))
    else:
        render(verdict, pair)
    raise typer.Exit(int(ExitCode.OK if verdict.green else ExitCode.RED))


def gate_file(pair: Path, sandbox: Sandbox, on_case: OnCase | None = None) -> Verdict:
    """Describe and gate one pair file. Raises `InputError` for anything else."""
    from kernel_agent.gate import check as gate_check
    from kernel_agent.oracle import describe
    from kernel_agent.pairs.meta import meta_node
    from kernel_agent.pairs.sections import SECTION_MARKERS, has_marker
    from kernel_agent.pairs.syntax import parse
    from kernel_agent.pairs.userfile import read_file, read_text

    source = read_text(pair)
    lacks = [] if meta_node(parse(source, pair)) is not None else ["no META"]
    lacks += [] if has_marker(source) else ["no section markers"]
    if lacks:
        markers = ", ".join(f"`{marker}`" for marker in SECTION_MARKERS)
        raise InputError(
            f"this is no pair file, it has {' and '.join(lacks)}: there is no backward section to check",
            path=pair,
            line=max(len(source.splitlines()), 1),
            remedy=f"A pair file has META = dict(grads=(...)) and the lines {markers} (docs/pair-format.md). "
            f"To make one of a forward: kernel-agent --file-path {pair}",
        )
    facts = read_file(pair)
    return gate_check(describe(facts, sandbox), facts.source, sandbox, on_case=on_case)


def render(verdict: Verdict, pair: Path) -> None:
    """The headline, one row per gradient, and what the gate has to say beside it."""
    from rich.text import Text

    from kernel_agent.report.table import verdict_table
    from kernel_agent.report.terminal import verdict_text

    out().print(Text(f"{pair.name}: ").append_text(verdict_text(verdict)), soft_wrap=True)
    if any(case.grads for case in verdict.cases):
        out().print(verdict_table(verdict))
    for note in verdict.notes:
        out().print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    if verdict.details:
        out().print(Text(verdict.details), soft_wrap=True)
