"""`kernel-agent recheck CERTIFICATE.json`: prove again what a certificate says, offline, and show what changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_agent.certificate.judged_again import Recheck
    from kernel_agent.certificate.record import Certificate, GradientRecord
    from kernel_agent.gate.verdict import CaseResult

_NAMED = 3
"""Cases that are named of many."""


def recheck(
    certificate: Annotated[Path, typer.Argument(help="certificate.json of a delivery, or of check --certificate.")],
    forward: Annotated[
        Path | None, typer.Option(help="Your forward file: refuse a certificate that speaks of another one.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="The exact tier alone, also where there is a GPU.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what became of it as JSON.")] = False,
) -> None:
    """Judge the sources in a certificate again, on this machine and without a model.

    Exit code 0: it still holds. 1: it does not, or was changed. 2: the file is no certificate.
    """
    from kernel_agent.certificate.judged_again import recheck as judge_again
    from kernel_agent.certificate.reading import read_certificate
    from kernel_agent.machine import gpu_name
    from kernel_agent.sandbox import Sandbox

    read = read_certificate(certificate)
    if forward is not None:
        _require_forward(read, forward)
    gpu = not exact and bool(gpu_name("auto"))
    with Sandbox() as sandbox, err().status(f"reading {certificate.name}") as status:

        def on_case(result: CaseResult, done: int, planned: int) -> None:
            status.update(f"{certificate.name}: {result.tier.value} case {done} of {planned}, {result.case}")

        found = judge_again(read, sandbox, folder=certificate.parent, gpu=gpu, on_case=on_case)
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        render(found, read, certificate)
    raise typer.Exit(int(ExitCode.OK if found.holds else ExitCode.RED))


def _require_forward(certificate: Certificate, forward: Path) -> None:
    """Refuse a certificate whose forward is not that of a file: a sound backward of something else proves nothing."""
    from kernel_agent.deliver.fingerprint import forward_fingerprint
    from kernel_agent.pairs.sections import truth_source
    from kernel_agent.pairs.syntax import parse
    from kernel_agent.pairs.userfile import read_text

    def fingerprint(source: str, path: Path) -> str:
        parse(source, path)  # says what is wrong with it
        return forward_fingerprint(truth_source(source))

    wanted = fingerprint(read_text(forward), forward)
    if fingerprint(certificate.sources.truth, Path(certificate.delivered)) != wanted:
        raise InputError(
            "the certificate speaks of another forward than this file's",
            path=forward,
            remedy="Its kernels or its functions were changed since, or it was made for another file: "
            f"kernel-agent --file-path {forward}",
        )


def render(found: Recheck, certificate: Certificate, path: Path) -> None:
    """The headline, a row per gradient, and what changed."""
    from rich.text import Text

    from kernel_agent.report.terminal import verdict_text

    said = "still holds" if found.holds else "does not hold"
    style = "bold green" if found.holds else "bold red"
    what = f" ({_plain(certificate.stub)}, issued {_plain(certificate.issued)})"
    out().print(Text.assemble(f"{path.name} ", (said, style), what), soft_wrap=True)
    now = Text(found.problem, style="red") if found.now is None else verdict_text(found.now)
    out().print(Text(f"then {found.then.value}, now ").append_text(now), soft_wrap=True)
    if found.gradients:
        out().print(_table(found))
    notes = () if found.now is None else found.now.notes
    for name, lines, colour in (
        ("changed", found.disagreements, "red"),
        ("here", found.machine, "yellow"),
        ("asked otherwise", found.gate, "yellow"),
        ("not asked again", _some(found.missing), "yellow"),
        ("asked for the first time", _some(found.new), "dim"),
        ("not looked at", found.not_replayed, "dim"),
        ("note", notes, "dim"),
        ("note of then", tuple(line for line in certificate.verdict.notes if line not in notes), "dim"),
    ):
        for line in lines:
            out().print(Text.assemble((f"{name}: ", colour), _plain(line)), soft_wrap=True)
    if not (found.machine or found.disagreements):
        out().print(Text("here: the same versions", style="dim"))
    if found.now is not None and found.now.details:
        out().print(Text(found.now.details), soft_wrap=True)


def _table(found: Recheck) -> Table:
    """One row per tier and gradient: the worst error as a part of the allowed one, then and now."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(Column("gradient", no_wrap=True), "tier", "then", "now", "worst case now", title_justify="left")
    for change in found.gradients:
        now = change.now
        style = "" if now is None else "green" if now.ratio <= 1.0 else "red"
        worst = "" if now is None else f"{now.case}, tile {now.tile}"
        table.add_row(
            Text(_plain(change.grad)), change.tier.value, _ratio(change.then), Text(_ratio(now), style), Text(worst)
        )
    return table


def _ratio(record: GradientRecord | None) -> str:
    return "-" if record is None else f"{record.ratio:.3g}"


def _some(names: Sequence[str]) -> tuple[str, ...]:
    """A line for a few names of cases, and how many more there are."""
    if not names:
        return ()
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ("; ".join(names[:_NAMED]) + more,)


def _plain(text: str) -> str:
    """What a file says without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
