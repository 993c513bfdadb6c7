"""Derived backwards of the pairs on a GPU: the native tier judges the real kernels at the required shapes and dtypes.

    python bench/derived_native.py [--jobs 12] [--seconds 500] [--only TEXT ...] [--resume]

`compiler_coverage.py` proves the algorithm of what is derived, in float64 and without a GPU; this says what rounding
and the hardware make of it. Of every pair with a true gradient the first backward that the compiler writes is taken.
No time is measured, so that many pairs can be judged side by side; `--seconds` is when no further one is begun, and
`--resume` goes on with those that have no row in `bench/derived_native.json`. The table goes to `.txt` beside it.
Pairs are taken in an order that hangs on a digest of their names: the first of them are a sample of all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kernel_agent.bench.gpu import GPU_LIMITS
from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.verdict import Status
from kernel_agent.oracle import describe
from kernel_agent.pairs.meta import Gradient, read_meta
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).parents[1]
PAIRS = ROOT / "datasets" / "kernel_pairs"
OPTIONS = BenchOptions(proof_elements=1 << 22, limits=replace(GPU_LIMITS, wall_s=150.0))
REFUSED, FAILED = "REFUSED", "FAILED"
"""In place of a verdict: nothing was derived; the truth or the derivation had no answer."""


@dataclass(frozen=True)
class Judged:
    """One pair."""

    name: str
    status: str
    """Of the verdict, `REFUSED` or `FAILED`."""
    why: str = ""
    """What the verdict says, or why there is none."""
    ratio: float = 0.0
    """The largest ratio of a gradient to what the rule allows."""
    cases: int = 0
    """That were judged."""
    device: str = ""
    seconds: float = 0.0


def name_of(path: Path) -> str:
    """Family and slug."""
    return f"{path.parent.name}/{path.stem}"


def judge(path: Path) -> Judged:
    """Derive one pair's forward and have its real kernels judged."""
    name, start = name_of(path), time.perf_counter()
    try:
        with Sandbox() as sandbox:
            spec = describe(read_file(path), sandbox)
            (draft, *_), _ = drafts(spec, sandbox, most=1)
            verdict = check_native(spec, draft.pair, sandbox, Rig(spec, sandbox, OPTIONS))
    except CannotDerive as error:
        return Judged(name, REFUSED, error.message.splitlines()[0])
    except KernelAgentError as error:
        return Judged(name, FAILED, error.message.splitlines()[0], seconds=round(time.perf_counter() - start, 1))
    scores = [score.ratio for case in verdict.cases for score in case.grads]
    return Judged(
        name,
        verdict.status.value,
        "" if verdict.green else f"{verdict.case}: {verdict.message}",
        max((ratio for ratio in scores if math.isfinite(ratio)), default=0.0),
        len(verdict.cases),
        verdict.machine.gpu if verdict.machine else "",
        round(time.perf_counter() - start, 1),
    )


def told(rows: list[Judged]) -> str:
    """The table."""
    counts = Counter(row.status for row in rows)
    green = [row for row in rows if row.status == Status.GREEN.value]
    devices = ", ".join(sorted({row.device for row in green if row.device}))
    lines = [
        f"{devices}: {len(rows)} pairs: " + ", ".join(f"{count} {status}" for status, count in counts.most_common())
    ]
    if green:
        ratios = sorted(row.ratio for row in green)
        lines.append(
            f"worst ratio to the bound of green ones: median {ratios[len(ratios) // 2]:.2f}, most {ratios[-1]:.2f}"
        )
    for status in sorted(set(counts) - {Status.GREEN.value}):
        lines += [
            "",
            f"{status}:",
            *(f"  {row.name}: {row.why.splitlines()[0][:200]}" for row in rows if row.status == status),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--only", nargs="*", default=[], help="take those whose names hold one of these")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, and judge the others")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    given = parser.parse_args()
    kept, start = given.out.with_suffix(".json"), time.monotonic()
    rows = (
        {row["name"]: Judged(**row) for row in json.loads(kept.read_text())} if given.resume and kept.exists() else {}
    )
    paths = [path for path in PAIRS.glob("*/*.py") if read_meta(path.read_text()).gradient is Gradient.TRUE]
    paths = [path for path in paths if not given.only or any(text in name_of(path) for text in given.only)]
    left = sorted(
        (path for path in paths if name_of(path) not in rows),
        key=lambda path: hashlib.sha256(name_of(path).encode()).digest(),
    )
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(judge, path) for path in left}
        for future in as_completed(running):
            if future.cancelled():
                continue
            row = future.result()
            rows[row.name] = row
            kept.write_text(json.dumps([asdict(rows[name]) for name in sorted(rows)], indent=1) + "\n")
            print(
                f"{len(rows)} {row.name} {row.status} {row.ratio:.2f} {row.why[:150]} {row.seconds:.0f} s", flush=True
            )
            if time.monotonic() - start > given.seconds:
                for other in running:
                    other.cancel()
    given.out.with_suffix(".txt").write_text(text := told([rows[name] for name in sorted(rows)]))
    print(text)


if __name__ == "__main__":
    main()
