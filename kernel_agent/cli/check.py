"""`kernel-agent check PAIR.py`: put any pair file through the gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.text import Text

    from kernel_agent.gate.mutants.records import MutationReport
    from kernel_agent.gate.verdict import CaseResult, Verdict
    from kernel_agent.oracle import Truths
    from kernel_agent.sandbox import Sandbox

    OnCase = Callable[[CaseResult, int, int], None]


def check(
    pair: Annotated[Path, typer.Argument(help="A pair file: a dataset entry or a delivered backward.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Reject gradients whose bits may differ from call to call.")
    ] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Then prove the gate on this pair: mutants of its backward must all die.")
    ] = False,
    sample: Annotated[
        int, typer.Option(min=0, help="With --mutants: at most so many of each class made on source; 0 is all.")
    ] = 0,
    keep: Annotated[Path | None, typer.Option(help="With --mutants: a folder for survivors and the record.")] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Where green: write what was proven, with sources and seeds, for `kernel-agent recheck`."),
    ] = None,
) -> None:
    """Prove the backward of a pair file against its own forward."""
    from pydantic_core import to_json

    from kernel_agent.cli.mutants import judge_mutants, keep_mutants, render_mutants
    from kernel_agent.sandbox import Sandbox

    if (sample or keep) and not mutants:
        raise InputError("--sample and --keep belong to --mutants", remedy=f"kernel-agent check {pair} --mutants")
    report = None

    with Sandbox() as sandbox, err().status(f"reading {pair.name}") as status:

        def on_case(result: CaseResult, done: int, planned: int) -> None:
            status.update(f"{pair.name}: case {done} of {planned}, {result.case}")

        truths = truths_of(pair, sandbox)
        verdict = gate_file(truths, on_case, deterministic=deterministic)
        if verdict.cases and not as_json:
            status.update(f"{pair.name}: cross-checking the truth")
            line = truth_line(truths)
        if mutants and verdict.green:
            status.stop()
            report = judge_mutants(truths, sample)
    if report is not None and keep is not None:
        keep_mutants(report, keep)
    if certificate is not None:
        certify(certificate, pair, truths, verdict, report)
    if as_json:
        parts = {"verdict": verdict, "mutants": report}
        print(
            to_json(parts, indent=2, inf_nan_mode="strings").decode() if mutants else verdict.model_dump_json(indent=2)
        )
    else:
        render(verdict, pair)
        if verdict.cases:
            out().print(line, soft_wrap=True)
        if report is not None:
            render_mutants(report)
    proven = verdict.green and (report is None or not report.survivors)
    raise typer.Exit(int(ExitCode.OK if proven else ExitCode.RED))


def certify(path: Path, pair: Path, truths: Truths, verdict: Verdict, report: MutationReport | None) -> None:
    """Write the certificate of a green verdict; say of a red one that there is none."""
    from kernel_agent.certificate.issue import issue
    from kernel_agent.wholefile import write_whole

    if not verdict.green:
        err().print("no certificate is written: only green verdicts have one", soft_wrap=True)
        return
    issued = issue(
        truths.spec,
        truths.spec.facts.source,
        verdict,
        file=pair.name,
        delivered=pair.read_bytes(),
        mutants=None if report is None else report.tally,
        name=path.name,
    )
    write_whole(path, issued.model_dump_json(indent=2) + "\n")
    err().print(f"certificate: {path}", soft_wrap=True)


def truths_of(pair: Path, sandbox: Sandbox) -> Truths:
    """The truths of one pair file, kept in memory. Raises `InputError` for anything else."""
    from kernel_agent.oracle import Truths, describe
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
    return Truths(describe(read_file(pair), sandbox), sandbox)


def gate_file(truths: Truths, on_case: OnCase | None = None, *, deterministic: bool = False) -> Verdict:
    """Gate the pair file that these are the truths of."""
    from kernel_agent.gate.checking import check as gate_check
    from kernel_agent.gate.options import GateOptions

    options = GateOptions(deterministic=deterministic)
    return gate_check(truths.spec, truths.spec.facts.source, truths.sandbox, options, on_case, truths=truths)


def truth_line(truths: Truths) -> Text:
    """What differences and the file's own `reference` say of the truth that the verdict was made with."""
    from rich.text import Text

    from kernel_agent.agent.workshop import cross_check_small, cross_checked
    from kernel_agent.oracle import TruthError

    try:
        seen = cross_checked(cross_check_small(truths, seed=0), 0.0)
    except TruthError as error:
        return Text(f"truth: not cross-checked, {error.message}", style="dim")
    return Text(f"truth: {seen.line}", style="dim" if seen.passed else "red")


def render(verdict: Verdict, pair: Path) -> None:
    """The headline, one row per gradient, and what the gate has to say beside it."""
    from rich.text import Text

    from kernel_agent.agent.diagnosiswords import what_lines, where_lines
    from kernel_agent.report.table import verdict_table
    from kernel_agent.report.terminal import verdict_text

    out().print(Text(f"{pair.name}: ").append_text(verdict_text(verdict)), soft_wrap=True)
    if any(case.grads for case in verdict.cases):
        out().print(verdict_table(verdict))
    for note in (*verdict.notes, *verdict.unordered):
        out().print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    for line in (*what_lines(verdict.diagnosis), *where_lines(verdict.diagnosis)):
        out().print(Text(line), soft_wrap=True)
    if verdict.diagnosis is not None and verdict.diagnosis.suspect is not None:
        suspect = verdict.diagnosis.suspect
        out().print(Text(f"line {suspect.line}: {suspect.statement}"), soft_wrap=True)
    if verdict.details:
        out().print(Text(verdict.details), soft_wrap=True)
