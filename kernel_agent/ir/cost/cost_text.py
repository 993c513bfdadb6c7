"""A cost report as plain text."""

from __future__ import annotations

from kernel_agent.ir.cost.cost_report import CostReport, LaunchCost, Traffic
from kernel_agent.ir.cost.counting import How
from kernel_agent.quantities import amount, duration, size

_COLUMNS = "{:<16} {:<9} {:>10} {:>10} {:>10} {:>10}"


def report_text(report: CostReport) -> str:
    """Every launch with its buffers, arithmetic and loops, then torch's part and the sum."""
    lines = [f"cost of {report.stub} on {report.device} (table of {report.table_date})"]
    for place, launch in enumerate(report.launches, 1):
        lines += ["", *_launch_lines(place, launch)]
    if report.torch:
        lines += ["", "torch between launches (coarse, not in the bound):"]
        for call in report.torch:
            lines.append(
                f"  {call.name} x{call.calls}: reads {size(call.read_bytes)}, writes {size(call.written_bytes)}"
            )
    lines += ["", f"lower bound of all launches: {duration(report.seconds)}"]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def how_text(launch: LaunchCost) -> str:
    """How the figures of a launch were found, with the error of a sample."""
    if launch.how is not How.SAMPLED:
        return str(launch.how.value)
    return (
        f"{launch.how.value}: {launch.walked} of {launch.programs}; halves of the sample differ by {launch.spread:.1%}"
    )


def _launch_lines(place: int, launch: LaunchCost) -> list[str]:
    where = f", line {launch.line}" if launch.line else ""
    lines = [
        f"{place}. {launch.kernel} grid {launch.grid}{where}: at least {duration(launch.bound.seconds)}",
        f"   found by: {how_text(launch)}",
        "   " + _COLUMNS.format("buffer", "access", "unique", "issued", "reuse", "sectors"),
    ]
    for buffer in launch.buffers:
        for name, part in (("read", buffer.read), ("write", buffer.write), ("atomic", buffer.atomic)):
            if part is not None:
                lines.append("   " + _COLUMNS.format(buffer.name[:16], name, *traffic_cells(part)))
    if launch.work:
        lines.append("   " + "; ".join(f"{work.kind.value}: {amount(work.operations)}" for work in launch.work))
    lines += [f"   {loop_text(launch, place)}" for place in range(len(launch.loops))]
    if launch.atomics:
        lines.append(f"   atomic updates: {amount(launch.atomics)}")
    bound = "; ".join(str(term) for term in launch.bound.terms)
    lines.append(f"   bound by {bound or 'nothing'}" + (" (fits in L2)" if launch.fits_l2 else ""))
    return lines


def traffic_cells(part: Traffic) -> tuple[str, str, str, str]:
    """Unique, issued, reuse and sectors of one row."""
    reuse = part.issued_bytes / part.unique_bytes if part.unique_bytes else 0.0
    return size(part.unique_bytes), size(part.issued_bytes), f"{reuse:.3g}x", size(part.sector_bytes)


def loop_text(launch: LaunchCost, place: int) -> str:
    """`loop at line 47 (start): 32 iterations per program`."""
    loop = launch.loops[place]
    where = f"loop at line {loop.line}" if loop.line else "loop"
    name = f" ({loop.variable})" if loop.variable else ""
    if loop.minimum == loop.maximum:
        return f"{where}{name}: {loop.maximum} iterations per program"
    return f"{where}{name}: {loop.minimum} to {loop.maximum} iterations per program, {loop.mean:.4g} on average"
