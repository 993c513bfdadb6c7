"""Print what the measured pairs of the dataset came to: python bench/pair_speeds.py > bench/pair_speeds.txt

One pair counts once: the geometric mean over its entries. `of bound` is the cost counter's least time (bytes that must
move at the datasheet's rate, products at the tensor cores' peak) over the measured one; a copy reaches 0.89 of it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.collection.speeds import PairSpeed, SpeedBook, SpeedStatus
from kernel_agent.pairs.meta import read_meta

ROOT = Path(__file__).resolve().parents[1] / "datasets"
SCANS = {"reverse-scan", "checkpointed-states", "chunked"}
GATHERS = {"gather-form", "inverse-map", "sorted-segments", "varlen"}
LISTED = 40


@dataclass(frozen=True)
class Pair:
    """What one pair came to."""

    name: str
    techniques: frozenset[str]
    us: float
    of_bound: float | None
    to_compiled: float | None
    products: bool
    atomics: int


Belongs = Callable[[Pair], bool]
KINDS: tuple[tuple[str, Belongs], ...] = (
    ("adds atomically (more than 100,000 times)", lambda pair: pair.atomics > 100_000),
    ("multiplies matrices", lambda pair: pair.products),
    ("walks a recurrence or scan", lambda pair: bool(pair.techniques & SCANS)),
    ("gathers, or follows ragged bounds", lambda pair: bool(pair.techniques & GATHERS)),
    ("moves bytes", lambda _: True),
)
"""The first that holds; what remains is bound by memory alone."""


def mean(values: Iterable[float | None]) -> float | None:
    """Geometric; None where a value is missing."""
    found = list(values)
    if not found or any(value is None for value in found):
        return None
    return math.exp(sum(math.log(value) for value in found if value is not None) / len(found))


def pairs_of(speeds: Iterable[PairSpeed]) -> list[Pair]:
    """One per slug that was proven and timed."""
    entries: dict[tuple[str, str], list[PairSpeed]] = defaultdict(list)
    for speed in speeds:
        if speed.status is SpeedStatus.MEASURED:
            entries[speed.family, speed.slug].append(speed)
    found = []
    for (family, slug), own in sorted(entries.items()):
        meta = read_meta((ROOT / "kernel_pairs" / family / f"{slug}.py").read_text(encoding="utf-8"))
        found.append(
            Pair(
                f"{family}/{slug}",
                frozenset(meta.techniques),
                mean(speed.backward_us for speed in own) or 0.0,
                mean(speed.of_bound for speed in own),
                mean(speed.to_compiled for speed in own),
                any(speed.tflops for speed in own),
                max(speed.atomics or 0 for speed in own),
            )
        )
    return found


def line(name: str, pairs: list[Pair]) -> str:
    """A row of the first table."""
    bounds = [pair.of_bound for pair in pairs if pair.of_bound is not None]
    ratios = [pair.to_compiled for pair in pairs if pair.to_compiled is not None]
    faster = sum(ratio >= 1.0 for ratio in ratios) / len(ratios)
    high = sum(bound >= 0.6 for bound in bounds) / len(bounds)
    return (
        f"{name:44} {len(pairs):5d} {statistics.median(bounds):9.2f} {high:10.0%} "
        f"{statistics.median(ratios):13.2f} {faster:12.0%}"
    )


def main() -> None:
    """Print the tables."""
    speeds = SpeedBook(ROOT / "results" / "h200.jsonl").read()
    pairs = pairs_of(speeds)
    devices = ", ".join(sorted({speed.device for speed in speeds}))
    families = len({pair.name.split("/")[0] for pair in pairs})
    print(f"{devices}: {len(pairs)} pairs of {families} families, each proven there by the native tier\n")
    print(f"{'':44} {'pairs':>5} {'of bound':>9} {'>= 0.6':>10} {'x compile':>13} {'>= 1.0x':>12}")
    print(line("all", pairs))
    left = pairs
    for name, belongs in KINDS:
        print(line(name, [pair for pair in left if belongs(pair)]))
        left = [pair for pair in left if not belongs(pair)]
    print("\nSlowest beside torch.compile of the reference:\n")
    slower = [pair for pair in pairs if pair.to_compiled is not None and pair.to_compiled < 1.0]
    for pair in sorted(slower, key=lambda pair: pair.to_compiled or 0.0)[:LISTED]:
        bound = "-" if pair.of_bound is None else f"{pair.of_bound:.2f}"
        print(f"{pair.name:48} {pair.us:9.1f} us {bound:>5} of the bound {pair.to_compiled:6.2f}x")


if __name__ == "__main__":
    main()
