"""`kernel-agent cost FILE.py`: bytes, arithmetic and the least time of a file's kernels on a named device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_agent.ir.cost.cost_report import CostReport, LaunchCost
    from kernel_agent.oracle.costs import EntryCost

BAR = 28
"""Characters of the longest bar."""


def cost(
    file: Annotated[Path | None, typer.Argument(help="A file with a forward stub, or a pair file.")] = None,
    device: Annotated[str, typer.Option(help="GPU to bound the time on; --list-devices names them.")] = "H100 SXM",
    entry: Annotated[str, typer.Option(help="Position in SWEEP, counted from 0, or `all`.")] = "0",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="Print the table of GPUs and end.")] = False,
) -> None:
    """Count what kernels do at the sizes of a SWEEP entry, without a GPU.

    Bytes and arithmetic per launch, trips of loops, and the least time that a GPU needs for them, with what bounds it.

    [bold]kernel-agent cost examples/matmul.py[/]\n
    [bold]kernel-agent cost examples/attention.py --device "A100 80GB SXM" --entry all[/]\n
    [bold]kernel-agent cost my_pair.py --json[/]        forward and backward of a pair
    """
    if list_devices:
        _show_devices(as_json)
        return
    if file is None:
        raise InputError("FILE is missing", remedy="kernel-agent cost FILE.py; kernel-agent cost --help has examples")
    if entry != "all" and not entry.isdecimal():
        raise InputError(
            f"--entry must be a position in SWEEP or `all`, not {entry!r}", remedy="kernel-agent cost --help"
        )
    from kernel_agent.pairs.userfile import read_file

    facts = read_file(file)
    from kernel_agent.ir.cost.devices import device_table
    from kernel_agent.oracle.costs import costs
    from kernel_agent.sandbox import Sandbox

    device_table().find(device)  # a wrong name is told before anything runs
    with Sandbox() as sandbox, err().status(f"counting {file.name}"):
        found = costs(facts, sandbox, device, [] if entry == "all" else [int(entry)])
    if as_json:
        print(json.dumps(_form(file, found), indent=2))
        return
    for one in found:
        _show_entry(file, one)
    if entry != "all" and found[0].entries > 1:
        hint = f"entry {found[0].position} of 0 to {found[0].entries - 1} in SWEEP; --entry all shows every one"
        err().print(hint, style="dim", soft_wrap=True)
    raise typer.Exit(int(ExitCode.OK))


def _form(file: Path, found: list[EntryCost]) -> dict[str, object]:
    entries = [
        {"position": one.position, "entry": one.label, **{name: part.to_dict() for name, part in one.parts.items()}}
        for one in found
    ]
    return {"file": str(file), "entries": entries}


def _show_entry(file: Path, one: EntryCost) -> None:
    from rich.text import Text

    for name, report in one.parts.items():
        from kernel_agent.quantities import duration

        title = Text(f"{file.name} {name}", style="bold").append(f" at {one.label}", style="not bold")
        title.append(f": at least {duration(report.seconds)} on {report.device}")
        out().print(title, soft_wrap=True)
        for place, launch in enumerate(report.launches, 1):
            _show_launch(place, launch)
        _show_torch(report)
        for note in (*report.notes, f"peak rates: table of {report.table_date}"):
            out().print(Text(f"note: {note}", style="dim"), soft_wrap=True)


def _show_launch(place: int, launch: LaunchCost) -> None:
    from rich.text import Text

    from kernel_agent.ir.cost.cost_text import how_text, loop_text
    from kernel_agent.quantities import amount

    line = f", line {launch.line}" if launch.line else ""
    out().print(Text(f"\n{place}. {launch.kernel} grid {launch.grid}{line}", style="bold"), soft_wrap=True)
    out().print(_buffer_table(launch))
    for work in launch.work:
        out().print(Text(f"  {work.kind.value}: {amount(work.operations)}"), soft_wrap=True)
    for loop in range(len(launch.loops)):
        out().print(Text(f"  {loop_text(launch, loop)}"), soft_wrap=True)
    if launch.atomics:
        out().print(Text(f"  atomic updates: {amount(launch.atomics)}"), soft_wrap=True)
    out().print(Text(f"  found by {how_text(launch)}", style="dim"), soft_wrap=True)
    _show_bound(launch)


def _buffer_table(launch: LaunchCost) -> Table:
    from rich.table import Table

    from kernel_agent.ir.cost.cost_text import traffic_cells

    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("  buffer")
    table.add_column("access")
    for column in ("unique", "issued", "reuse", "sectors"):
        table.add_column(column, justify="right")
    for buffer in launch.buffers:
        for name, part in (("read", buffer.read), ("write", buffer.write), ("atomic", buffer.atomic)):
            if part is not None:
                table.add_row(f"  {buffer.name} {buffer.dtype}", name, *traffic_cells(part))
    return table


def _show_bound(launch: LaunchCost) -> None:
    """One bar per resource; the longest is the lower bound."""
    from rich.text import Text

    from kernel_agent.quantities import duration

    for term in launch.bound.terms:
        share = term.seconds / launch.bound.seconds
        filled = max(1, round(share * BAR))
        name = f"{term.resource.value}{f' ({term.detail})' if term.detail else ''}"
        line = Text(f"  {name:<28} ").append("█" * filled, style="cyan").append("░" * (BAR - filled), style="dim")
        line.append(f" {duration(term.seconds)}", style="bold" if term is launch.bound.terms[0] else "")
        out().print(line, soft_wrap=True)
    if launch.fits_l2:
        out().print(Text("  all its bytes fit in L2: warm, memory may take less", style="dim"), soft_wrap=True)


def _show_torch(report: CostReport) -> None:
    from rich.text import Text

    from kernel_agent.quantities import size

    if report.torch:
        out().print(Text("\ntorch between launches (from shapes, not in the bound):"), soft_wrap=True)
    for call in report.torch:
        text = f"  {call.name} x{call.calls}: reads {size(call.read_bytes)}, writes {size(call.written_bytes)}"
        out().print(Text(text), soft_wrap=True)


def _show_devices(as_json: bool) -> None:
    from kernel_agent.cli.tables import Listing
    from kernel_agent.ir.cost.devices import TABLE, device_table
    from kernel_agent.ir.cost.work import Work

    if as_json:
        print(TABLE.read_text(encoding="utf-8"), end="")
        return
    table = device_table()
    kinds = {"fp16 dot": Work.DOT_FP16, "tf32 dot": Work.DOT_TF32, "fp8 dot": Work.DOT_FP8, "fp32": Work.FP32}
    columns = ["device", "GB/s", "L2 MB", "SMs", *(f"{name} T/s" for name in kinds), "source"]
    listing = Listing(f"peak rates without sparsity, table of {table.date}", columns, frozenset({"source"}))
    for device in table.devices:
        rates = [f"{device.tera_per_s[kind]:g}" if kind in device.tera_per_s else "-" for kind in kinds.values()]
        source = f"{device.sources[0].title}, {device.sources[0].date}"
        size = f"{device.l2_mb:g}"
        listing.add(device.name, f"{device.bandwidth_gb_s:g}", size, str(device.multiprocessors), *rates, source)
    listing.show(out())
