"""Measure the diagnosis of red candidates: is the planted mistake of a mutant named, is anything else named?

Run: python bench/diagnosis.py [--sample N] [--jobs N] [--pairs SLUG ...]; --more goes on, --table prints it again

Mutants are made from the backwards of the proven pairs by `planted.py`, judged by the gate as any candidate, and kept
where the verdict is a wrong gradient (for ignored strides, which the sanitizer sees first, an access out of bounds or
an output that is not finite as well). Writes what was said of every mutant to `diagnosis.json` and the table to
`diagnosis.txt`, both beside this file.

A name is right when it is the planted class or one that the same edit also is:

- a term left out, doubled or of the wrong sign is, where it is all of the gradient, a scale or a sign, and all that
  comes from one output; terms that are equal or opposite stand for one another;
- a factor or a sign on one of several stores into a gradient is one on a term of it;
- a factor of a term that is the same number everywhere is a scale;
- what comes from one output is a term of the gradient, which is said so;
- a block, an output or a term that is all there is leaves a gradient that is zero, which is said as a scale of 0.

Everything else that is said is a wrong name, and so is every name for a mistake outside the bank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from planted import Planted, plant

from kernel_agent.data import pairs_root
from kernel_agent.gate import GateOptions, Status, Verdict, check
from kernel_agent.gate.diagnosis.records import Fault
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

HERE = Path(__file__).parent
NAMED_BAR, WRONG_BAR = 0.80, 0.02
_TERMS = frozenset({Fault.MISSING_TERM, Fault.DOUBLED_TERM, Fault.TERM_SIGN, Fault.SCALE, Fault.SIGN})
EQUIVALENT = {
    Fault.MISSING_TERM: _TERMS | {Fault.OUTPUT_IGNORED},
    Fault.SCALE: frozenset({Fault.SCALE, Fault.DOUBLED_TERM, Fault.FACTOR}),
    Fault.FACTOR: frozenset({Fault.FACTOR, Fault.SCALE}),
    Fault.SIGN: frozenset({Fault.SIGN, Fault.TERM_SIGN}),
    Fault.DOUBLED_TERM: _TERMS,
    Fault.TERM_SIGN: _TERMS,
}
"""Classes that name the same edit; a class that is missing here stands for itself alone."""
_LEFT_OUT = frozenset({Fault.LAST_BLOCK_SKIPPED, Fault.OUTPUT_IGNORED, Fault.MISSING_TERM})
_OF_OUTPUT = "the part that comes from output"
_ZERO = "it is 0 times the truth"


@dataclass(frozen=True)
class Said:
    """What one diagnosis said of one mutant."""

    pair: str
    mutant: str
    planted: str
    """Class of the mistake; empty outside of the bank."""
    status: str
    named: tuple[tuple[str, str, str], ...] = ()
    """Gradient, class and statement of every hypothesis."""
    where: tuple[str, ...] = ()
    readings: tuple[str, ...] = ()
    suspect: tuple[int, str] | None = None
    line: int = 0
    """Line of the planted mistake."""
    seconds: float = 0.0
    """Of the diagnosis alone."""
    notes: tuple[str, ...] = field(default=())

    @property
    def outcome(self) -> str:
        """`right`, `wrong`, `silent`, or why it does not count."""
        if self.status == Status.GREEN.value:
            return "green"
        planted = Fault(self.planted) if self.planted else None
        judged = self.status == Status.WRONG_GRADIENT.value
        seen_first = (Status.OUT_OF_BOUNDS.value, Status.NOT_FINITE.value)
        judged |= planted is Fault.STRIDES_IGNORED and self.status in seen_first
        if not judged:
            return "other status"
        if not self.named:
            return "silent"
        return "right" if all(_names(planted, Fault(fault), said) for _, fault, said in self.named) else "wrong"


def _names(planted: Fault | None, fault: Fault, statement: str) -> bool:
    """Whether a statement of a class is true of the planted mistake, see the module."""
    if planted is None:
        return False
    if fault is Fault.SCALE and statement.startswith(_ZERO) and planted in _LEFT_OUT:
        return True
    if planted is Fault.OUTPUT_IGNORED and statement.startswith(_OF_OUTPUT) and fault is Fault.MISSING_TERM:
        return True
    return fault in EQUIVALENT.get(planted, frozenset({planted}))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Measure the diagnosis of red candidates.")
    parser.add_argument("--sample", type=int, default=0, help="mutants per pair and class; 0 is all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pairs", nargs="*", default=[])
    parser.add_argument("--more", action="store_true", help="keep what is measured and add the pairs that are not")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "diagnosis.json")
    args = parser.parse_args()
    if args.table:
        print(table([read(row) for row in json.loads(args.out.read_text())]))
        return
    files = [path for path in pair_files() if not args.pairs or path.stem in args.pairs]
    rows = [read(row) for row in json.loads(args.out.read_text())] if args.more else []
    files = [path for path in files if path.stem not in {row.pair for row in rows}]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for path, found in zip(files, pool.map(diagnosed, files, [args.sample] * len(files)), strict=True):
            print(f"{path.stem}: {dict(Counter(said.outcome for said in found))}", file=sys.stderr, flush=True)
            rows += found
            args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    text = table(rows)
    args.out.with_suffix(".txt").write_text(text)
    print(text)


def read(row: dict[str, Any]) -> Said:
    """A row of the file that `main` writes."""
    lists = ("where", "readings", "notes")
    suspect = None if row["suspect"] is None else (int(row["suspect"][0]), str(row["suspect"][1]))
    named = tuple((grad, fault, said) for grad, fault, said in row["named"])
    return Said(**{**row, **{name: tuple(row[name]) for name in lists}, "named": named, "suspect": suspect})


def pair_files() -> list[Path]:
    """The shipped pairs and those of the gate's tests."""
    small = HERE.parent / "test" / "gate" / "pairs"
    return [*sorted(small.glob("*.py")), *sorted(pairs_root().rglob("*.py"))]


def diagnosed(path: Path, sample: int) -> list[Said]:
    """The diagnosis of the mutants of one pair, in a process of its own."""
    torch.set_num_threads(1)
    mutants = chosen(plant(path.read_text()), sample)
    with Sandbox() as sandbox:
        spec = describe(read_file(path), sandbox)
        truths = Truths(spec, sandbox)
        return [
            diagnosed_as(path.stem, m, check(spec, m.source, sandbox, GateOptions(), truths=truths)) for m in mutants
        ]


def chosen(mutants: Sequence[Planted], sample: int) -> list[Planted]:
    """At most `sample` mutants of each class, spread over the lines of the file; all for 0."""
    if not sample:
        return list(mutants)
    result: list[Planted] = []
    for fault in dict.fromkeys(m.fault for m in mutants):
        here = [m for m in mutants if m.fault is fault]
        step = max(1, len(here) // sample)
        result += here[step // 2 :: step][:sample]
    return result


def diagnosed_as(pair: str, mutant: Planted, verdict: Verdict) -> Said:
    """What the verdict on a mutant says of it."""
    found = verdict.diagnosis
    common = Said(pair, mutant.name, mutant.fault.value if mutant.fault else "", verdict.status.value, line=mutant.line)
    if found is None:
        return common
    return Said(
        **{
            **{name: getattr(common, name) for name in ("pair", "mutant", "planted", "status", "line")},
            "named": tuple((h.grad, h.fault.value, h.statement) for h in found.what),
            "where": tuple(f"{r.grad}: {r.statement}" for r in found.where),
            "readings": found.readings,
            "suspect": None if found.suspect is None else (found.suspect.line, found.suspect.statement),
            "seconds": found.seconds,
            "notes": found.notes,
        }
    )


def table(rows: Sequence[Said]) -> str:
    """Named, silent and wrong by class, the two bars, and how long it took."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Sequence[Said]) -> Iterator[str]:
    counted = [row for row in rows if row.outcome in ("right", "silent", "wrong")]
    yield f"Diagnosis of {len(counted)} red mutants of {len({row.pair for row in rows})} proven backwards"
    apart = Counter(row.outcome for row in rows if row not in counted)
    yield f"({len(rows)} made; {apart['green']} of them still green, {apart['other status']} red by another status)"
    yield ""
    yield f"{'planted':30} {'mutants':>7} {'named':>6} {'silent':>7} {'wrong':>6}"
    for name in [*(fault.value for fault in Fault), ""]:
        here = [row.outcome for row in counted if row.planted == name]
        if here:
            right, silent, wrong = (here.count(o) for o in ("right", "silent", "wrong"))
            yield f"{name or 'outside the bank':30} {len(here):7} {right:6} {silent:7} {wrong:6}"
    bank = [row for row in counted if row.planted]
    right = sum(row.outcome == "right" for row in bank) / max(1, len(bank))
    wrong = sum(row.outcome == "wrong" for row in counted) / max(1, len(counted))
    yield ""
    yield f"named, of the bank's classes: {right:6.1%}  (bar: at least {NAMED_BAR:.0%}: {_met(right >= NAMED_BAR)})"
    yield f"wrong names, of all:          {wrong:6.1%}  (bar: at most {WRONG_BAR:.0%}: {_met(wrong <= WRONG_BAR)})"
    lines = [row for row in counted if row.suspect is not None]
    exact = sum(row.suspect is not None and row.suspect[0] == row.line for row in lines)
    yield f"first suspect line told: {len(lines)} of {len(counted)}; it is the planted line in {exact} of them"
    seconds = sorted(row.seconds for row in counted)
    if seconds:
        last = seconds[int(0.95 * (len(seconds) - 1))]
        yield f"seconds per diagnosis: median {seconds[len(seconds) // 2]:.2f}, 95th percentile {last:.2f}"


def _met(bar: bool) -> str:
    return "met" if bar else "missed"


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
