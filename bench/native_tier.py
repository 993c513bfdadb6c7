"""How the native tier judges real kernels of proven pairs, on this machine's GPU: `python bench/native_tier.py`.

Every pair of the dataset is proven in the exact tier, so every red verdict here is a false alarm of the native tier, a
kernel that loses precision, or one that fails on the device. Prints one line per pair: the verdict, the worst error of
each gradient as a part of the allowed one, and seconds; then a summary. `--every 10` takes each tenth pair,
`--workers 6` runs six at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import Rig
from kernel_agent.errors import KernelAgentError
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

PAIRS = Path(__file__).resolve().parents[1] / "datasets" / "kernel_pairs"


def judged(path: Path, sandbox: Sandbox) -> dict[str, object]:
    """One row of the result."""
    start = time.monotonic()
    row: dict[str, object] = {"pair": path.stem}
    try:
        spec = describe(read_file(path), sandbox)
        verdict = check_native(spec, spec.facts.source, sandbox, Rig(spec, sandbox))
    except KernelAgentError as error:
        return {**row, "status": type(error).__name__, "message": error.message, "seconds": time.monotonic() - start}
    worst: dict[str, float] = {}
    for case in verdict.cases:
        for score in case.grads:
            worst[score.grad] = max(worst.get(score.grad, 0.0), score.ratio)
    return {
        **row,
        "status": verdict.status.value,
        "message": "" if verdict.green else verdict.message,
        "details": "" if verdict.green else verdict.details,
        "notes": list(verdict.notes),
        "ratios": worst,
        "seconds": time.monotonic() - start,
    }


def main() -> None:
    """Judge, print, and write the rows where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    paths = sorted(PAIRS.glob("*/*.py"))[options.first :: options.every]
    rows = []
    with Sandbox() as sandbox, ThreadPoolExecutor(options.workers) as pool:
        for row in pool.map(lambda path: judged(path, sandbox), paths):
            rows.append(row)
            ratios = " ".join(f"{name}:{ratio:.2f}" for name, ratio in dict(row.get("ratios") or {}).items())
            print(
                f"{row['pair']}: {row['status']} {ratios} {row['seconds']:.0f} s {row['message'] or ''}"[:400],
                flush=True,
            )
    print(f"{len(rows)} pairs: {dict(Counter(str(row['status']) for row in rows))}")
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
