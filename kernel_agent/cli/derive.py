"""`kernel-agent derive FILE.py`: write the backward of a forward by the compiler, proven, without a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_agent.compiler.derived import Derived, DraftCost
    from kernel_agent.gate.options import GateOptions
    from kernel_agent.gate.verdict import CaseResult
    from kernel_agent.pairs.spec import FileFacts
    from kernel_agent.sandbox import Sandbox


@dataclass(frozen=True)
class _Asked:
    """What is to be derived, and by what means."""

    source: FileFacts
    schedules: tuple[str, ...]
    """These alone; empty: the best that is proven."""
    options: GateOptions
    sandbox: Sandbox


def derive(
    file: Annotated[Path, typer.Argument(help="A file with a forward stub, or a pair file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Take this schedule alone instead of the best that is proven.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say on stderr which schedule was taken, and why no better one.")
    ] = False,
    tune: Annotated[
        bool | None,
        typer.Option(
            "--tune/--no-tune",
            help="Choose tiles, warps and stages by times on the GPU, or without one by a compile for sm_90. "
            "By default where there is a GPU.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="For the search for these numbers and their proofs, all together.", min=1.0)
    ] = 150.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Take no schedule whose gradients may differ from call to call.")
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Take what was derived of this very file before.")
    ] = True,
) -> None:
    """Derive a backward from the kernels of a forward, and prove it.

    The pair file goes to stdout. No model is asked and no GPU is needed. What was proven is kept: of an unchanged file
    it is printed at once.

    [bold]kernel-agent derive examples/swiglu.py[/]\n
    [bold]kernel-agent derive examples/layernorm.py --output layernorm_pair.py --explain[/]
    """
    from kernel_agent.pairs.userfile import read_file

    source = read_file(file)
    if output is not None and output.exists():
        raise InputError(
            "this file exists already and is not overwritten", path=output, remedy="choose another --output"
        )
    from kernel_agent.compiler.errors import CannotDerive
    from kernel_agent.compiler.kept import derivation_key, user_pairs
    from kernel_agent.compiler.preload import PRELOAD
    from kernel_agent.gate.options import GateOptions
    from kernel_agent.sandbox import Sandbox

    schedules = () if schedule is None else (_known(schedule),)
    options = GateOptions(deterministic=deterministic)
    kept, key = user_pairs(), derivation_key(source.source, schedules=schedules, options=options)
    with Sandbox(PRELOAD) as sandbox:  # its server starts at the first job, if there is one
        asked = _Asked(source, schedules, options, sandbox)
        found = kept.get(key) if cache else None
        before = found is not None
        if found is not None:
            err().print(f"{file.name}: derived and proven before; --no-cache derives it again")
        else:
            with kept.deriving(key):
                found = kept.get(key) if cache else None
                before = found is not None
                refused = kept.refusal(key) if cache and found is None else None
                if refused is not None:
                    refused.path = source.path
                    raise refused
                try:
                    found = found or _derived(asked, compare=explain)
                except CannotDerive as error:
                    kept.refuse(key, error)
                    raise
                kept.put(key, found)
        if tune or (tune is None and _gpu()):
            found = _fitting(asked, found, seconds, cache=cache)
    if found.verdict.faults:  # the backward of what is computed by chance is proven, and of no use
        from kernel_agent.compiler.faults import SHOWN_BY

        for line in (*found.verdict.faults, SHOWN_BY):
            err().print(f"{file.name}: {line}", soft_wrap=True)
    if explain:
        _explain(found, before=before)
    if output is None:
        print(found.draft.pair, end="")
    else:
        output.write_text(found.draft.pair, encoding="utf-8")
        err().print(f"wrote {output}: {found.verdict.message}; kernel-agent check {output} proves it again")
    raise typer.Exit(int(ExitCode.OK))


def _known(schedule: str) -> str:
    from kernel_agent.compiler.schedule.schedules import SCHEDULES

    if schedule not in SCHEDULES:
        raise InputError(f"there is no schedule `{schedule}`", remedy=f"Take one of: {', '.join(SCHEDULES)}.")
    return schedule


def _derived(asked: _Asked, *, compare: bool, known: Sequence[str] = ()) -> Derived:
    sandbox, name = asked.sandbox, asked.source.path.name
    with err().status(f"{name}: following the stub") as status:
        sandbox.warm()  # it imports while we do
        from kernel_agent.compiler.derive import derive as derive_pair
        from kernel_agent.oracle import describe

        def on_case(result: CaseResult, done: int, planned: int) -> None:
            status.update(f"{name}: case {done} of {planned}, {result.case}")

        return derive_pair(
            describe(asked.source, sandbox),
            sandbox,
            schedules=asked.schedules,
            options=asked.options,
            on_case=on_case,
            compare=compare,
            known=known,
        )


def _gpu() -> str:
    """The model of the GPU that is here, as the driver tells it; empty where there is none."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "GPU" if next(Path("/dev").glob("nvidia[0-9]*"), None) is not None else ""


def _fitting(asked: _Asked, found: Derived, seconds: float, *, cache: bool) -> Derived:
    """The derived pair with the numbers that are best here, or that of another schedule where this machine's GPU
    refuses it. Raises `CannotDerive` where it refuses all."""
    from kernel_agent.compiler.errors import CannotDerive, RefusedNatively

    refused: list[str] = []
    known: list[str] = []
    while True:
        try:
            tuned = _tuned(asked, found, seconds, cache=cache)
            return replace(tuned, refused=(*tuned.refused, *refused))
        except RefusedNatively as error:
            refused.append(f"{', '.join(dict.fromkeys(found.draft.schedules))}: {error.message}")
            known.append(found.draft.candidate.digest)
        err().print(f"{asked.source.path.name}: {refused[-1]}; another schedule is tried", soft_wrap=True)
        try:
            found = _derived(asked, compare=False, known=known)
        except CannotDerive as error:
            from kernel_agent.compiler.faults import unproven

            reason = "no derived backward is right on this GPU: " + "; ".join(refused)
            raise unproven(reason, asked.source, asked.sandbox) from error


def _tuned(asked: _Asked, found: Derived, seconds: float, *, cache: bool) -> Derived:
    """The derived pair with the numbers that are best here, kept as the pair itself is. Raises `RefusedNatively`."""
    from kernel_agent.compiler.errors import RefusedNatively
    from kernel_agent.compiler.kept import derivation_key, user_pairs

    gpu = _gpu()
    kept = user_pairs()
    numbers = f"numbers for {gpu or 'sm_90'}, {seconds:g} s"
    key = derivation_key(asked.source.source, numbers, schedules=asked.schedules, options=asked.options)
    known = kept.get(key) if cache else None
    if known is not None:
        return known
    from kernel_agent.compiler.tuning.settle import settle
    from kernel_agent.compiler.tuning.tune import tune
    from kernel_agent.oracle import describe
    from kernel_agent.pairs.assemble import candidate_from_pair

    name, start = asked.source.path.name, time.monotonic()
    with err().status(f"{name}: choosing tiles, warps and stages") as status:

        def told(line: str) -> None:
            status.update(f"{name}: {line} ({time.monotonic() - start:.0f} of {seconds:.0f} s)")

        chosen = (tune if gpu else settle)(
            describe(asked.source, asked.sandbox),
            found.draft.pair,
            asked.sandbox,
            seconds=seconds,
            proof_s=found.seconds,
            on_line=told,
        )
    if chosen.refused:
        raise RefusedNatively(chosen.refused, path=asked.source.path)
    draft = replace(found.draft, remarks=(*found.draft.remarks, f"tiles, warps and stages: {chosen.line}"))
    orderly = chosen.verdict is not None and not (asked.options.deterministic and chosen.verdict.unordered)
    if chosen.changed and orderly and chosen.verdict is not None:
        candidate = candidate_from_pair(chosen.pair).model_copy(update={"forward": draft.candidate.forward})
        draft = replace(draft, pair=chosen.pair, candidate=candidate)
        found = replace(found, verdict=chosen.verdict)
    found = replace(found, draft=draft, seconds=found.seconds + chosen.seconds)
    kept.put(key, found)
    return found


def _explain(found: Derived, *, before: bool) -> None:
    """`before`: it was derived by an earlier command, which may not have compared anything."""
    from rich.text import Text

    taken = ", ".join(dict.fromkeys(found.draft.schedules)) or found.draft.schedule
    err().print(Text(f"schedule: {taken}", style="bold"), soft_wrap=True)
    if found.costs:
        title = f"counted and modelled at {found.costs[0].label}, not measured:"
        err().print(Text(title, style="italic"), soft_wrap=True)
        err().print(_costs(found.costs))
        for cost in found.costs:
            if cost.microseconds is None:
                err().print(Text(f"not counted: {_named(cost)}: {cost.why}", style="dim"), soft_wrap=True)
    else:
        why = (
            "not compared when it was derived; --no-cache does"
            if before
            else "one pair can be written, or was asked for"
        )
        err().print(Text(f"costs: {why}", style="dim"), soft_wrap=True)
    for line in found.refused:
        err().print(Text(f"not taken: {line}", style="dim"), soft_wrap=True)
    for line in found.draft.remarks:
        err().print(Text(f"remark: {line}", style="dim"), soft_wrap=True)
    err().print(Text(f"{found.verdict.message}, in {found.seconds:.1f} s", style="dim"), soft_wrap=True)


def _costs(costs: tuple[DraftCost, ...]) -> Table:
    """The candidates in the order in which they are tried, with what they cost."""
    from rich.table import Table

    table = Table()
    for name in ("schedules", "bytes", "flops", "atomics", "programs", "modelled us"):
        table.add_column(name, justify="left" if name == "schedules" else "right")
    table.add_column("")  # over the first
    for cost in costs:
        counts = (f"{count:.3g}" for count in (cost.bytes, cost.flops, cost.atomics))
        known = cost.microseconds is not None
        figures = (*counts, str(cost.programs), f"{cost.microseconds:.1f}") if known else ("-",) * 5
        table.add_row(_named(cost), *figures, cost.why if known else "")
    return table


def _named(cost: DraftCost) -> str:
    return ", ".join(dict.fromkeys(cost.schedules))
