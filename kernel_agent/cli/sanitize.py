"""`kernel-agent sanitize FILE.py`: every memory error and race of a file's kernels, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode

if TYPE_CHECKING:
    from kernel_agent.ir.sanitizer.findings import Finding
    from kernel_agent.oracle.sanitizing import SanitizedPart


def sanitize(
    file: Annotated[Path, typer.Argument(help="A file with a forward stub, or a pair file.")],
    seed: Annotated[int, typer.Option(help="Seed of the arguments and of the cotangents.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find memory errors and races of kernels at every SWEEP entry, without a GPU.

    Accesses out of bounds of their argument, races between programs, lanes of one store that disagree, reads of memory
    that nothing wrote, outputs with holes, and 32-bit offsets that wrap at the sizes asked for. A pair's backward is
    run with random cotangents.

    [bold]kernel-agent sanitize examples/attention.py[/]\n
    [bold]kernel-agent sanitize datasets/kernel_pairs/softmax/softmax_row.py[/]        forward and backward
    """
    from kernel_agent.pairs.userfile import read_file

    facts = read_file(file)
    from kernel_agent.oracle.sanitizing import sanitize_file
    from kernel_agent.sandbox import Sandbox

    with Sandbox() as sandbox, err().status(f"reading {file.name}") as status:

        def on_part(part: SanitizedPart, entries: int) -> None:
            status.update(f"{file.name}: entry {part.place + 1} of {entries}, {part.label}, {part.part}")

        parts = sanitize_file(facts, sandbox, on_part, seed=seed)
    if as_json:
        print(json.dumps(_form(file, parts), indent=2))
    else:
        _show(file, parts)
    raise typer.Exit(int(exit_code(parts)))


def exit_code(parts: tuple[SanitizedPart, ...]) -> ExitCode:
    """RED for findings; BAD_INPUT where a required entry does not run to its end, or nothing ran at all."""
    if any(part.report.findings for part in parts):
        return ExitCode.RED
    ran = any(part.report.stop is None and part.report.launches for part in parts)
    return ExitCode.OK if ran and all(part.clean for part in parts) else ExitCode.BAD_INPUT


def _form(file: Path, parts: tuple[SanitizedPart, ...]) -> dict[str, Any]:
    return {
        "file": str(file),
        "clean": exit_code(parts) is ExitCode.OK,
        "parts": [asdict(part) for part in parts],
    }


def _show(file: Path, parts: tuple[SanitizedPart, ...]) -> None:
    from rich.text import Text

    from kernel_agent.cli.tables import Listing

    found = _merged(parts)
    entries = len({part.place for part in parts})
    what = f"{len(found)} finding{'' if len(found) == 1 else 's'}" if found else "clean"
    style = "bold red" if found else "bold green"
    if not found and exit_code(parts) is not ExitCode.OK:
        what, style = "stopped", "bold red"
    title = Text(f"{file.name}: ").append(what, style=style)
    out().print(title.append(f" at {entries} SWEEP entr{'y' if entries == 1 else 'ies'}"), soft_wrap=True)
    listing = Listing("", ["entry", "part", "launches", "found"], frozenset({"found"}))
    for part in parts:
        shrunk = "" if part.run_at == part.label else f" (run at {part.run_at})"
        listing.add(part.label + shrunk, part.part, str(len(part.report.launches)), _result(part))
    listing.show(out())
    _show_findings(found)
    for part in parts:
        if part.report.stop is not None and part.required:
            out().print(Text(f"\n{part.label}, {part.part} stopped: {part.report.stop}"), soft_wrap=True)
    for note in dict.fromkeys(note for part in parts for note in part.report.notes):
        out().print(Text(f"note: {note}", style="dim"), soft_wrap=True)


def _result(part: SanitizedPart) -> str:
    report = part.report
    if report.findings:
        return ", ".join(f"{len(report.of(kind))} {kind}" for kind in report.kinds)
    if report.stop is not None:
        return "stopped" if part.required else f"not run: {report.stop.message.splitlines()[0]}"
    return "clean"


def _merged(parts: tuple[SanitizedPart, ...]) -> dict[Finding, list[str]]:
    """Each defect once, at the first entry that shows it, with the labels of all entries that do."""
    first: dict[tuple[object, ...], Finding] = {}
    labels: dict[Finding, list[str]] = {}
    for part in parts:
        for finding in part.report.findings:
            key = (part.part, finding.kind, finding.kernel, finding.line, finding.buffer)
            labels.setdefault(first.setdefault(key, finding), []).append(part.label)
    return labels


def _show_findings(found: dict[Finding, list[str]]) -> None:
    from rich.text import Text

    from kernel_agent.ir.sanitizer.sanitizer_report import EXPLANATIONS, said

    for kind, explanation in EXPLANATIONS.items():
        mine = [finding for finding in found if finding.kind is kind]
        if mine:
            out().print(Text(f"\n{kind}", style="bold").append(f": {explanation}", style="not bold"), soft_wrap=True)
        for finding in mine:
            labels = found[finding]
            more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
            text = Text(f"  {said(finding)}").append(f"; at {labels[0]}{more}", style="dim")
            out().print(text, soft_wrap=True)
