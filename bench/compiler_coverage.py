"""What the compiler derives: the forwards of the pairs, the examples and the executor's corpus, each proven by a quick
check of the gate.

    python bench/compiler_coverage.py [--jobs 2] [--every 5] [--limit N] [--only TEXT] [--resume]

Writes `bench/compiler_coverage.json` and `.txt` as it goes: `--resume` keeps the rows that are there, so that a run
which was cut short goes on, with the same compiler. A forward is DERIVED where the gate accepts a pair at the swept
sizes under random and strided cotangents, REFUSED where the compiler says why it cannot, and RED where it writes a
pair that the gate does not accept, which would be a defect. Pairs with a custom gradient are left out.
"""

from __future__ import annotations

import argparse
import enum
import json
import multiprocessing
import re
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

from corpus_files import corpus_files

from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.preload import PRELOAD
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.checking import check
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.meta import Gradient, read_meta
from kernel_agent.pairs.sections import has_all_markers, split_sections
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Job, Sandbox

ROOT = Path(__file__).parents[1]
PAIRS, EXAMPLES = ROOT / "datasets" / "kernel_pairs", ROOT / "examples"
QUICK = GateOptions(seeds=(0,), max_elements=1 << 14, max_volume=1 << 20, odd_sizes=1, max_cases=4)
"""Every required entry once or more, made small."""


class Outcome(str, enum.Enum):
    """What became of a forward."""

    DERIVED = "DERIVED"
    REFUSED = "REFUSED"
    RED = "RED"
    UNJUDGED = "UNJUDGED"
    """The truth has no answer, or something else failed."""


@dataclass(frozen=True)
class Coverage:
    """One forward."""

    name: str
    outcome: Outcome
    schedule: str = ""
    """The one that was accepted."""
    why: str = ""
    """Why it was refused, or what the gate says."""
    red: tuple[str, ...] = ()
    """Schedules that the gate refused on the way, with its words."""
    atomics: int = 0
    """Atomic additions in the derived source."""
    written_atomics: int = 0
    """Atomic operations in the source of the hand-written backward; 0 where there is none."""
    lines: int = 0
    """Of the derived backward section."""
    kernels: int = 0
    """That were derived for it, those of schedules not taken left out."""
    derive_s: float = 0.0
    """From reading the file to its text, on one core beside others; the sandbox's server is running by then."""
    total_s: float = 0.0
    """With the gate's check."""

    @property
    def kind(self) -> str:
        """Where it comes from."""
        folder = self.name.partition("/")[0]
        return folder if folder in ("examples", "corpus") else "pairs"


def name_of(path: Path) -> str:
    """Family and slug, or folder and stem."""
    return f"{path.parent.name}/{path.stem}"


def read(path: Path) -> list[Coverage]:
    """The rows of a record; none where there is no file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [Coverage(**{**row, "outcome": Outcome(row["outcome"]), "red": tuple(row["red"])}) for row in rows]


def keep(results: list[Coverage], out: Path) -> None:
    """Write record and table."""
    rows = sorted(results, key=lambda one: one.name)
    out.with_suffix(".json").write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    out.with_suffix(".txt").write_text(told(rows))


@cache
def ready_sandbox() -> Sandbox:
    """One for each process of ours, with torch imported: a person who derives ten kernels waits for that once."""
    sandbox = Sandbox(PRELOAD)
    Finalize(None, sandbox.close, exitpriority=1)
    sandbox.run(Job("builtins:id"))
    return sandbox


def cover(path: Path) -> Coverage:
    """Derive one forward and judge it."""
    name, sandbox = name_of(path), ready_sandbox()
    start = time.perf_counter()
    try:
        spec = describe(read_file(path), sandbox)
        written, _ = drafts(spec, sandbox)
        derive_s = time.perf_counter() - start
        truths = Truths(spec, sandbox)
        red: list[str] = []
        for draft in written:
            verdict = check(spec, draft.pair, sandbox, QUICK, truths=truths, diagnose=False)
            if verdict.green:
                backward = draft.candidate.backward
                return Coverage(
                    name,
                    Outcome.DERIVED,
                    draft.schedule,
                    red=tuple(red),
                    atomics=backward.count("tl.atomic_add("),
                    written_atomics=_written_atomics(path.read_text()),
                    lines=backward.count("\n"),
                    kernels=backward.count("@triton.jit"),
                    derive_s=derive_s,
                    total_s=time.perf_counter() - start,
                )
            red.append(f"{draft.schedule}: {verdict.status.value}: {verdict.message}")
        return Coverage(name, Outcome.RED, why=red[-1], red=tuple(red), total_s=time.perf_counter() - start)
    except CannotDerive as error:
        return Coverage(name, Outcome.REFUSED, why=error.message, total_s=time.perf_counter() - start)
    except KernelAgentError as error:
        return Coverage(name, Outcome.UNJUDGED, why=error.message, total_s=time.perf_counter() - start)


def _written_atomics(text: str) -> int:
    return split_sections(text).backward.count("tl.atomic_") if has_all_markers(text) else 0


def forwards(folder: Path) -> list[Path]:
    """The files, the pairs' custom gradients left out. `folder`: where those of the corpus are written."""
    pairs = [p for p in sorted(PAIRS.glob("*/*.py")) if read_meta(p.read_text()).gradient is Gradient.TRUE]
    return [*sorted(EXAMPLES.glob("*.py")), *pairs, *corpus_files(folder)]


def told(results: list[Coverage]) -> str:
    """The table."""
    counts = Counter(one.outcome for one in results)
    rows = [f"{len(results)} forwards: " + ", ".join(f"{counts[o]} {o.value}" for o in Outcome)]
    derived = [one for one in results if one.outcome is Outcome.DERIVED]
    kinds: dict[str, list[Coverage]] = {"pairs": [], "examples": [], "corpus": []}
    for one in results:
        kinds[one.kind].append(one)
    rows += [_shares(kind, group) for kind, group in kinds.items() if group]
    schedules = Counter(one.schedule for one in derived)
    rows.append("schedules: " + ", ".join(f"{name} {count}" for name, count in schedules.most_common()))
    rows += _pace(derived)
    for outcome in (Outcome.RED, Outcome.UNJUDGED):
        rows += ["", f"{outcome.value}:"] if counts[outcome] else []
        rows += [f"  {one.name}: {one.why.splitlines()[0]}" for one in results if one.outcome is outcome]
    fallen = [one for one in derived if one.red]
    rows += ["", "red schedules that another one took the place of:"] if fallen else []
    rows += [f"  {one.name}: {one.red[0].splitlines()[0]}" for one in fallen]
    reasons = Counter(_reason(one.why) for one in results if one.outcome is Outcome.REFUSED)
    rows += ["", "refused because:"] if reasons else []
    rows += [f"  {count:4d}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join(rows) + "\n"


def _pace(derived: list[Coverage]) -> list[str]:
    """How long derivation took, for a whole file and for each kernel that it wrote."""
    measured = [one for one in derived if one.kernels]
    if not measured:
        return []
    files, kernels = [one.derive_s for one in measured], [one.derive_s / one.kernels for one in measured]
    return [
        f"seconds to derive a {what}: median {statistics.median(took):.1f}, "
        f"{sum(pace <= 5.0 for pace in took) / len(took):.1%} within 5, most {max(took):.1f}"
        for what, took in (("file", files), ("kernel", kernels))
    ]


def _shares(kind: str, results: list[Coverage]) -> str:
    """How many of one kind are derived, and how many so without atomics that the hand-written backward has not."""
    derived = [one for one in results if one.outcome is Outcome.DERIVED]
    spared = sum(one.atomics <= one.written_atomics for one in derived)
    count = len(results)
    return (
        f"{kind}: {len(derived)} of {count} derived ({len(derived) / count:.1%}), {spared} ({spared / count:.1%}) "
        + ("with no more atomics than the hand-written backward" if kind == "pairs" else "without atomics")
    )


def _reason(text: str) -> str:
    """A refusal without the names and numbers of one forward."""
    return re.sub(r"\b\d+\b", "N", re.sub(r"`[^`]*`", "`...`", text.splitlines()[0]))


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take one of so many")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--only", default="", help="take those whose path holds this")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, and derive the others")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    given = parser.parse_args()
    results = read(given.out.with_suffix(".json")) if given.resume else []
    known = {one.name for one in results}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        chosen = [path for path in forwards(Path(folder)) if given.only in str(path)][:: given.every][: given.limit]
        running = [pool.submit(cover, path) for path in chosen if name_of(path) not in known]
        for future in as_completed(running):
            one = future.result()
            results.append(one)
            keep(results, given.out)
            print(f"{len(results)}/{len(chosen)} {one.name} {one.outcome.value} {one.why[:150]}", flush=True)
    print(told(sorted(results, key=lambda one: one.name)))


if __name__ == "__main__":
    main()
