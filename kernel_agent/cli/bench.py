"""`kernel-agent bench FILE`: the time of a proven backward on this machine's GPU, or its modelled time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel_agent.bench.records import Measurement, ShapeTime
    from kernel_agent.cli.tables import Listing
    from kernel_agent.gate.verdict import CaseResult, Verdict
    from kernel_agent.oracle import Truths


def bench(
    file: Annotated[
        Path,
        typer.Argument(help="A pair file, a delivered folder, or a forward file with a hand-written backward."),
    ],
    model: Annotated[
        str | None, typer.Option("--modelled", help="Model the time on a named GPU instead, such as 'H100 SXM'.")
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Time the file's `reference`, too, eager and compiled.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts and times as JSON.")] = False,
) -> None:
    """Time the backward alone at every required shape of SWEEP, once it is proven.

    Cold caches, medians and quartiles by CUDA events, beside eager autograd and torch.compile of the file's
    `reference`, and the least time by the cost counter. A time is only shown beside a green verdict.

    [bold]kernel-agent bench datasets/kernel_pairs/softmax/softmax_row.py[/]\n
    [bold]kernel-agent bench generated/layernorm-1a2b3c4d[/]        what a run delivered\n
    [bold]kernel-agent bench my_pair.py --modelled "H100 SXM"[/]        without a GPU
    """
    from kernel_agent.sandbox import Sandbox

    pair = pair_in(file)
    with Sandbox() as sandbox, err().status(f"reading {pair.name}") as status:
        from kernel_agent.bench.gpu import require_gpu
        from kernel_agent.ir.cost.devices import device_table

        if model is None:
            require_gpu()  # where there is none, that is told before anything runs
        else:
            device_table().find(model)
        truths, source = _read(pair, sandbox)

        def on_case(result: CaseResult, done: int, planned: int) -> None:
            status.update(f"{pair.name}: case {done} of {planned}, {result.case}")

        verdicts, found = _judged(truths, source, model, baselines, on_case)
    _show(pair, verdicts, found, as_json, _command(file, model, baselines))
    raise typer.Exit(int(ExitCode.OK if all(v.green for v in verdicts) and found is not None else ExitCode.RED))


def pair_in(file: Path) -> Path:
    """The file itself, or the operator in a delivered folder. Raises `InputError`."""
    if not file.is_dir():
        return file
    found = sorted(file.glob("*_backward.py"))
    if len(found) != 1:
        raise InputError(
            f"this folder holds {len(found)} delivered backwards instead of one (*_backward.py)",
            path=file,
            remedy="Name a delivered folder, such as generated/layernorm-1a2b3c4d, or the file itself.",
        )
    return found[0]


def _read(pair: Path, sandbox: Any) -> tuple[Truths, str]:
    """What truth is about, and the text of the whole pair."""
    from kernel_agent.oracle import Truths, describe
    from kernel_agent.pairs.assemble import assemble, handwritten
    from kernel_agent.pairs.userfile import read_file

    facts = read_file(pair)
    spec = describe(facts, sandbox)
    source = facts.source if facts.is_pair else assemble(spec, handwritten(spec))
    return Truths(spec, sandbox), source


def _judged(
    truths: Truths, source: str, model: str | None, baselines: bool, on_case: Any
) -> tuple[list[Verdict], Measurement | None]:
    """Verdicts of both tiers, and the time once they are green."""
    from kernel_agent.gate.checking import check as gate_check

    verdicts = [gate_check(truths.spec, source, truths.sandbox, on_case=on_case, truths=truths)]
    if not verdicts[0].green:
        return verdicts, None
    if model is not None:
        from kernel_agent.bench.modelled import modelled
        from kernel_agent.pairs.assemble import candidate_from_pair

        candidate = candidate_from_pair(source)
        if not truths.spec.facts.is_pair:
            candidate = candidate.model_copy(update={"forward": None})
        return verdicts, modelled(truths.spec, candidate, truths.sandbox, model)
    from kernel_agent.bench.measure import measure_source
    from kernel_agent.bench.native import check_native
    from kernel_agent.bench.rig import BenchOptions, Rig

    rig = Rig(truths.spec, truths.sandbox, BenchOptions(baselines=baselines))
    verdicts.append(check_native(truths.spec, source, truths.sandbox, rig, on_case=on_case))
    if not verdicts[1].green:
        return verdicts, None
    return verdicts, measure_source(truths.spec, source, truths.sandbox, rig)


def _command(file: Path, model: str | None, baselines: bool) -> str:
    parts = ["kernel-agent bench", str(file)]
    parts += [f'--modelled "{model}"'] if model is not None else []
    parts += [] if baselines else ["--no-baselines"]
    return " ".join(parts)


def _show(pair: Path, verdicts: list[Verdict], found: Measurement | None, as_json: bool, command: str) -> None:
    if as_json:
        form = {
            "file": str(pair),
            "command": command,
            "verdicts": [verdict.model_dump(mode="json") for verdict in verdicts],
            "measurement": None if found is None else found.model_dump(mode="json"),
        }
        print(json.dumps(form, indent=2))
        return
    from rich.text import Text

    from kernel_agent.report.terminal import verdict_text

    for verdict in verdicts:
        line = Text(f"{pair.name}, {verdict.tier} tier: ").append_text(verdict_text(verdict))
        out().print(line, soft_wrap=True)
        for note in verdict.notes:
            out().print(Text(f"note: {note}", style="dim"), soft_wrap=True)
        if not verdict.green and verdict.details:
            out().print(Text(verdict.details), soft_wrap=True)
    if found is None:
        return
    versions = f", {', '.join(found.versions)}" if found.versions else ""
    out().print(f"one backward alone, {found.basis.value}: {found.device}{versions}", style="bold", soft_wrap=True)
    shape_table(found).show(out())
    if found.kernels:
        out().print("its launches at the shape that takes longest", style="bold", soft_wrap=True)
        kernel_table(found).show(out())
    for fact in found.facts:
        out().print(Text(f"note: {fact}", style="dim"), soft_wrap=True)
    out().print(Text(f"by: {command}", style="dim"), soft_wrap=True)


_SHAPE_COLUMNS: dict[str, Callable[[ShapeTime], str]] = {
    "us": lambda shape: f"{shape.median_us:.1f}",
    "spread": lambda shape: f"{shape.spread:.1%}",
    "of bound": lambda shape: _share(shape.bound_us, shape.median_us),
    "eager us": lambda shape: _time(shape.eager_us),
    "speed-up on eager": lambda shape: _ratio(shape.eager_us, shape.median_us),
    "compile us": lambda shape: _time(shape.compiled_us),
    "speed-up on compile": lambda shape: _ratio(shape.compiled_us, shape.median_us),
    "own us": lambda shape: _time(shape.own_us),
}


def shape_table(found: Measurement) -> Listing:
    """One row per shape: microseconds, what they are compared with, and how near they are to the least time."""
    from kernel_agent.bench.records import Basis
    from kernel_agent.cli.tables import Listing

    columns = {
        name: [text(shape) for shape in found.shapes]
        for name, text in _SHAPE_COLUMNS.items()
        if name in ("us", "spread") or any(text(shape) != "-" for shape in found.shapes)
    }
    if found.basis is Basis.MODELLED:
        del columns["spread"]
    listing = Listing("", ["shape", *columns])
    for number, shape in enumerate(found.shapes):
        listing.add(shape.label, *(cells[number] for cells in columns.values()))
    return listing


def kernel_table(found: Measurement) -> Listing:
    """One row per launch at the shape that takes longest."""
    from kernel_agent.cli.tables import Listing

    names = ["kernel", "us", "least us", "bound by", "atomics", "registers", "spills B", "shared B"]
    listing = Listing("", names)
    for kernel in found.kernels:
        listing.add(
            kernel.name,
            f"{kernel.microseconds:.1f}",
            _time(kernel.bound_us),
            kernel.bound_by or "-",
            str(kernel.atomics),
            *("-" if n is None else str(n) for n in (kernel.registers, kernel.spills, kernel.shared_bytes)),
        )
    return listing


def _time(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.1f}"


def _ratio(other: float | None, own: float) -> str:
    return "-" if other is None else f"{other / own:.2f}x"


def _share(bound: float | None, own: float) -> str:
    return "-" if bound is None else f"{bound / own:.0%}"
