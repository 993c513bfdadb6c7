"""Which forwards the compiler's front reads: every launch of the 511 pairs' stubs at their smallest size.

    python bench/compiler_front.py [--only SUBSTRING] [--processes 2] > bench/compiler_front.txt

Stubs run on the CPU with launches captured and not executed. The table counts launches by kernel that become a program
of the compiler, and the reasons why others do not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.front import read_launch
from kernel_agent.errors import KernelAgentError
from kernel_agent.ir.capture.capture import Launch
from kernel_agent.ir.capture.device import standin
from kernel_agent.ir.execution import ExecOptions, run_once
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.sweep import read_sweep, smallest
from kernel_agent.pairs.userfile import read_file

PAIRS = Path(__file__).parents[1] / "datasets" / "kernel_pairs"


@dataclass(frozen=True)
class Reading:
    """What became of one kernel of a pair."""

    pair: str
    kernel: str
    error: str
    """Empty where it was read."""
    symbols: int
    """Constexprs whose values tiles may change."""
    ops: int
    seconds: float


def captured(path: Path) -> tuple[Launch, ...]:
    """The launches of a file's stub at its smallest size; none is executed."""
    facts = read_file(path)
    with tempfile.TemporaryDirectory() as scratch:
        module = load_truth(facts, Path(scratch))
        stub = getattr(module, facts.stub)
        with standin():
            arguments = build_arguments(module, smallest(read_sweep(module.SWEEP, path)), device="cpu", seed=0)
            options = ExecOptions(sanitize=False)
            run, _ = run_once(stub, arguments.args, arguments.kwargs, (), options, safe=False, runner=_unrun)
    return run.launches


def _unrun(*_: Any) -> None:
    """Execute nothing."""


def read_pair(path: Path) -> list[Reading]:
    """Read every kernel of a pair, once for each way it is specialised."""
    warnings.simplefilter("ignore")
    name = f"{path.parent.name}/{path.stem}"
    try:
        launches = captured(path)
    except KernelAgentError as error:
        return [Reading(name, "", f"capture: {error.message}", 0, 0, 0.0)]
    found, seen = [], set()
    for launch in launches:
        if launch.build.key in seen:
            continue
        seen.add(launch.build.key)
        start = time.perf_counter()
        error, ops, symbols = "", 0, 0
        try:
            kernel = read_launch(launch)
            ops = sum(1 for _ in kernel.ops)
            symbols = len(kernel.extents)
        except CannotDerive as refused:
            error = refused.message
        except Exception as broken:
            error = f"BROKEN {type(broken).__name__}: {broken}"
        found.append(Reading(name, launch.kernel, error, symbols, ops, time.perf_counter() - start))
    return found


def reason(error: str) -> str:
    """An error without its place."""
    return re.sub(r"^[\w.]+(, line \d+)?: ", "", error)[:100]


def report(readings: list[Reading]) -> None:
    """Print the table."""
    good = [reading for reading in readings if not reading.error]
    pairs = {reading.pair for reading in readings}
    whole = pairs - {reading.pair for reading in readings if reading.error}
    print(f"{len(good)} of {len(readings)} kernels read ({100 * len(good) / len(readings):.1f} %)")
    print(f"{len(whole)} of {len(pairs)} pairs with all their kernels ({100 * len(whole) / len(pairs):.1f} %)")
    times = sorted(reading.seconds for reading in readings)
    print(f"seconds for a kernel: {times[len(times) // 2]:.2f} at the median, {times[-1]:.2f} at most\n")
    counts = Counter(reason(reading.error) for reading in readings if reading.error)
    for text, count in counts.most_common():
        print(f"{count:4}  {text}")
        some = [f"{r.pair} ({r.kernel})" for r in readings if r.error and reason(r.error) == text]
        print(f"      {', '.join(some[:4])}")


def main() -> int:
    """Read all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    paths = [path for path in sorted(PAIRS.glob("*/*.py")) if options.only in str(path)]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        report([reading for some in pool.map(read_pair, paths, chunksize=4) for reading in some])
    return 0


if __name__ == "__main__":
    sys.exit(main())
