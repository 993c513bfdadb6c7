"""Count the bounds of measured pairs anew, where the pair's text is still the measured one: no GPU is needed.

    python bench/pair_bounds.py [--jobs 8] [--only-missing] [--seconds 300] [datasets/results/h200.jsonl]

Rewrites the file: times stay, and what the cost counter says (bound, rates, atomics) is replaced.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from pathlib import Path

from kernel_agent.collection.counted import COUNT_LIMITS, with_cost
from kernel_agent.collection.measuring import at_bench
from kernel_agent.collection.speeds import PairSpeed, SpeedBook, SpeedStatus
from kernel_agent.errors import KernelAgentError
from kernel_agent.oracle import describe
from kernel_agent.oracle.costs import EntryCost, costs
from kernel_agent.pairs.spec import content_hash
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[1] / "datasets"


def counted(path: Path, device: str) -> list[EntryCost]:
    """Costs of one pair at its BENCH. Raises `KernelAgentError`."""
    with Sandbox() as sandbox:
        spec = at_bench(describe(read_file(path), sandbox))
        return costs(spec.facts, sandbox, device, range(len(spec.sweep)), COUNT_LIMITS)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="?", default=ROOT / "results" / "h200.jsonl")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only-missing", action="store_true", help="count those without a bound")
    parser.add_argument("--seconds", type=float, default=None, help="stop waiting after so many")
    given = parser.parse_args()
    speeds = SpeedBook(given.records).read()
    chosen: dict[Path, list[int]] = defaultdict(list)
    for place, speed in enumerate(speeds):
        path = ROOT / "kernel_pairs" / speed.family / f"{speed.slug}.py"
        same = path.is_file() and content_hash(path.read_text(encoding="utf-8")) == speed.hash
        wanted = speed.of_bound is None or not given.only_missing
        if speed.status is SpeedStatus.MEASURED and same and wanted:
            chosen[path].append(place)
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(counted, path, speeds[places[0]].device): path for path, places in chosen.items()}
        try:
            for future in as_completed(running, timeout=given.seconds):
                path = running[future]
                try:
                    found = {cost.label: cost for cost in future.result()}
                except KernelAgentError as error:
                    print(f"{path.stem}: {error.message}", flush=True)
                    continue
                for place in chosen[path]:
                    speeds[place] = with_cost(speeds[place], found.get(speeds[place].entry))
                    print(f"{path.stem}: {_told(speeds[place])}", flush=True)
        except TimeoutError:
            print("time is up: what was not counted keeps what it had")
            pool.shutdown(wait=True, cancel_futures=True)
    given.records.write_text("".join(f"{speed.line}\n" for speed in speeds), encoding="utf-8")


def _told(speed: PairSpeed) -> str:
    return f"{speed.bound_us} us, {speed.of_bound} of it reached [{speed.entry}]"


if __name__ == "__main__":
    main()
