"""What a verdict costs: `python bench/gate.py`.

Full exact-tier verdicts of shipped pairs, truth included, nothing kept from before but a started sandbox, and the start
of a child. Seconds on the wall, the best of `--repeats`, and processor seconds of each kind of process: on a machine
that does other work too, only those say something. How fast a core is comes with them: shared ones change their pace
twofold within minutes.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kernel_agent.gate import check
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Job, Sandbox

PAIRS = Path(__file__).resolve().parents[1] / "datasets" / "kernel_pairs"
BARS = {"layernorm_row": 2.0, "fa2_causal": 5.0}
"""Seconds that a verdict may take on two cores."""
START_BAR = 0.3


class _Timed(Sandbox):
    """Notes how long the jobs of each entry take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    def run(self, job: Job, *args: Any, **kwargs: Any) -> Any:
        """As `Sandbox.run`."""
        start = time.perf_counter()
        report = super().run(job, *args, **kwargs)
        self.seconds[job.entry.rpartition(":")[2]] += time.perf_counter() - start
        return report


def verdict_row(slug: str, repeats: int) -> str:
    """The best of some verdicts of a pair, each from nothing."""
    (path,) = PAIRS.glob(f"*/{slug}.py")
    best, jobs, cases, processor = float("inf"), {}, 0, float("inf")
    for _ in range(repeats):
        with _Timed() as sandbox:
            spec = describe(read_file(path), sandbox)
            ready = _processor_seconds_of(sandbox)
            sandbox.seconds.clear()
            start = time.perf_counter()
            verdict = check(spec, spec.facts.source, sandbox)
            seconds = time.perf_counter() - start
            used = _processor_seconds_of(sandbox) - ready
        assert verdict.green, verdict.message
        processor = min(processor, used)
        if seconds < best:
            best, jobs, cases = seconds, dict(sandbox.seconds), len(verdict.cases)
    parts = ", ".join(f"{name} {took:.2f}" for name, took in jobs.items())
    bar = f", bar {BARS[slug]:.0f} s" if slug in BARS else ""
    return f"{slug}: {cases} cases in {best:.2f} s ({processor:.2f} s of processor time{bar}): {parts}"


def _processor_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _processor_seconds_of(sandbox: Sandbox) -> float:
    """Of this process and of all ended children of the fork server."""
    fields = Path(f"/proc/{sandbox.server_pid}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(int(field) for field in fields[11:15])  # utime, stime, and those of children that were waited for
    return _processor_seconds() + ticks / os.sysconf("SC_CLK_TCK")


def pace_row() -> str:
    """What everybody can measure on a machine of their own."""
    took = []
    for _ in range(3):
        start, total = time.process_time(), 0
        for number in range(10_000_000):
            total += number * number
        took.append(time.process_time() - start)
    return f"this core: ten million sums of squares in Python in {min(took):.2f} s"


def start_row(repeats: int) -> str:
    """A child that does nothing, from the request to its burial."""
    with Sandbox() as sandbox:
        job = Job("builtins:id")  # imports nothing
        sandbox.run(job)
        took = []
        for _ in range(10 * repeats):
            start = time.perf_counter()
            report = sandbox.run(job)
            took.append(time.perf_counter() - start)
            assert report.finished, report
    return f"child start to end: {min(took):.3f} s, median {sorted(took)[len(took) // 2]:.3f} s, bar {START_BAR} s"


def main() -> None:
    """Print a row per figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("pairs", nargs="*", default=list(BARS))
    options = parser.parse_args()
    print(start_row(options.repeats), flush=True)
    for slug in options.pairs:
        print(pace_row(), flush=True)
        print(verdict_row(slug, options.repeats), flush=True)


if __name__ == "__main__":
    main()
