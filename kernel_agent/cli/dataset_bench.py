"""`kernel-agent dataset bench`: time the backwards of the pairs on this machine's GPU, sitting by sitting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode, InputError

if TYPE_CHECKING:
    from kernel_agent.cli.tables import Listing
    from kernel_agent.collection.speeds import PairSpeed

JOB_BYTES = 12 << 30
"""Memory of the GPU for one pair at work: most need less, and one that lacks any waits until it has all."""
PROOF_BYTES = 10 << 30
"""Memory of the GPU for the exact gradients of one pair at the size at which it is proven, in float64."""


def bench_pairs(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Pair files or folders; default: all shipped pairs.")
    ] = None,
    to: Annotated[Path, typer.Option("--out", help="File of records to add to.")] = Path("datasets/results/h200.jsonl"),
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Stop after so many seconds; go on another time.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Pairs prepared at a time, of which one is timed; 0: by cores and memory.")
    ] = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one pair, waits for others left out.")] = 240.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is recorded for this GPU.")] = False,
    prove_on: Annotated[int, typer.Option(min=0, help="GPU that computes exact gradients; GPU 0 times.")] = 0,
    tune: Annotated[
        int,
        typer.Option(
            min=0, help="Variants of each backward (block sizes, warps, stages, loops) to try; needs --write."
        ),
    ] = 0,
    write: Annotated[Path | None, typer.Option("--write", help="Folder for pairs that --tune makes faster.")] = None,
) -> None:
    """Time each backward alone at the sizes of BENCH: proven on real kernels, beside eager and compiled PyTorch.

    A pair whose text is recorded for this GPU is skipped, so the work spreads over sittings; each line is on disk
    before the next. A pair that fails, hangs or needs too much memory is one line, and the next goes on.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kernel_agent.bench.gpu import require_gpu

    if tune and write is None:
        remedy = "Give a folder: --write tuned. The pairs themselves are left as they are."
        raise InputError("--tune needs a place for the faster texts", remedy=remedy)
    require_gpu()
    import torch

    from kernel_agent.collection.pairfiles import pair_files
    from kernel_agent.collection.sitting import Measured, Options, left_over, sit
    from kernel_agent.collection.speeds import SpeedBook
    from kernel_agent.data import pairs_root

    book = SpeedBook(to)
    if prove_on >= torch.cuda.device_count():
        raise InputError(
            f"there is no GPU {prove_on}", remedy=f"--prove-on takes 0 to {torch.cuda.device_count() - 1} here."
        )
    memory = [torch.cuda.get_device_properties(gpu).total_memory for gpu in (0, prove_on)]
    workers = jobs or max(1, min(memory[0] // JOB_BYTES, len(os.sched_getaffinity(0)) // 2))
    proofs = max(1, memory[1] // PROOF_BYTES)
    options = Options(torch.cuda.get_device_name(), workers, seconds, limit, fresh, prove_on, proofs, tune, write)
    files = pair_files(paths or [pairs_root()])
    wanted = left_over(files, book, options)
    err().print(f"{options.device}: {len(files) - len(wanted)} of {len(files)} pairs are recorded in {to}")
    done: list[PairSpeed] = []
    at_work: list[str] = []
    columns = (TextColumn("pairs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=err()) as progress:
        task = progress.add_task("", total=len(wanted))
        measured = 0
        for event in sit(wanted, book, options):
            if isinstance(event, Measured):
                measured += 1
                done += event.speeds
                at_work.remove(event.path.stem)
                for speed in event.speeds:
                    progress.console.print(_line(speed), markup=False, soft_wrap=True)
                if event.faster is not None:
                    progress.console.print(f"  faster text: {event.faster}", markup=False, soft_wrap=True)
                progress.advance(task)
            else:
                at_work.append(event.task.path.stem)
            progress.update(task, description=", ".join(at_work))
    if done:
        _table(done).show(out())
    if measured < len(wanted):
        err().print(f"{len(wanted) - measured} pairs are left for another sitting: run the same command again")
    failures = sum(speed.backward_us is None for speed in done)
    raise typer.Exit(int(ExitCode.RED if failures else ExitCode.OK))


def _line(speed: PairSpeed) -> str:
    if speed.backward_us is None:
        return f"{speed.family}/{speed.slug}: {speed.status.value}: {speed.message}"
    return f"{speed.family}/{speed.slug} {speed.entry}: {speed.backward_us:.1f} us"


def _table(speeds: list[PairSpeed]) -> Listing:
    from kernel_agent.cli.tables import Listing

    names = ("pair", "entry", "us", "spread", "of bound", "x compile", "x eager", "GB/s", "TFLOP/s", "atomics")
    listing = Listing("", (*names, "saved MB", "status"), frozenset({"entry"}))
    for speed in sorted(speeds, key=lambda speed: (speed.family, speed.slug, speed.entry)):
        listing.add(
            f"{speed.family}/{speed.slug}",
            speed.entry,
            _number(speed.backward_us, ".1f"),
            _number(speed.spread, ".1%"),
            _number(speed.of_bound, ".0%"),
            _number(speed.to_compiled, ".2f"),
            _number(speed.to_eager, ".2f"),
            _number(speed.gb_s, ".0f"),
            _number(speed.tflops, ".0f"),
            _number(speed.atomics, "d"),
            _number(None if speed.saved_bytes is None else speed.saved_bytes / 1e6, ".1f"),
            speed.status.value,
        )
    return listing


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
