"""Bytes that derived backwards move, beside those of the pairs' hand-written ones, by the cost counter.

    python bench/compiler_traffic.py [--jobs 2] [--every 5] [--limit N] [--only TEXT] [--again] [--buffers]

Of every pair with a true gradient, the first entry of BENCH (where that cannot be counted in time: the largest
required entry of SWEEP). Traffic is what the launches read, write and update, each different byte once per launch,
and what torch moves between them; forwards, and what they save, count for neither. The derived backward is the
first one written, for SWEEP and, if the entry that is counted launches what none of SWEEP does, for that as well;
`compiler_coverage.py` asks the gate about those for SWEEP. Rows are kept in `bench/compiler_traffic.jsonl` as they
come, and pairs that have one are not counted again without `--again`, which leaves the rows of pairs that are not
chosen; the summary goes to `bench/compiler_traffic.txt`. `--buffers` shows instead what the launches of both do to
every buffer: where an excess comes from.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.derived import Draft
from kernel_agent.compiler.errors import OTHER_CONFIGURATIONS
from kernel_agent.errors import KernelAgentError
from kernel_agent.oracle import describe
from kernel_agent.oracle.costs import EntryCost, costs
from kernel_agent.pairs.meta import Gradient, read_meta
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.pairs.sweep import largest_required
from kernel_agent.pairs.userfile import read_file, read_source
from kernel_agent.sandbox import Limits, Sandbox

ROOT = Path(__file__).parents[1]
PAIRS = ROOT / "datasets" / "kernel_pairs"
DEVICE = "H100 SXM"
LIMITS = Limits(wall_s=1500.0, memory_bytes=12 << 30)
"""Of counting one backward at one entry: guards against hangs alone, for the largest entries take minutes."""
FILLS = 0.02
"""Share of a hand-written backward's traffic from which what torch moves more is a reason."""
MEDIAN, TAIL = 1.05, 1.5
"""What the median of the ratios, and 95 % of them, should not pass."""


@dataclass(frozen=True)
class Moved:
    """What one backward moves at one entry."""

    label: str
    launch_bytes: float
    """Different bytes per launch, all launches together."""
    torch_bytes: float
    issued_bytes: float
    """By the launches, each access counted."""
    atomics: float
    """Elements that are added to atomically."""

    @property
    def traffic(self) -> float:
        """Bytes."""
        return self.launch_bytes + self.torch_bytes


@dataclass(frozen=True)
class Row:
    """One pair."""

    name: str
    schedules: tuple[str, ...] = ()
    derived: Moved | None = None
    written: Moved | None = None
    real_sizes: bool = False
    """Counted at an entry of BENCH."""
    why: str = ""
    """Why a figure is missing, or is not of BENCH."""
    seconds: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Derived over hand-written."""
        if self.derived is None or self.written is None or not self.written.traffic:
            return None
        return self.derived.traffic / self.written.traffic


def row(path: Path) -> Row:
    """Derive one pair's forward and count both backwards."""
    name, start = f"{path.parent.name}/{path.stem}", time.perf_counter()
    found = Row(name)
    try:
        with Sandbox() as sandbox:
            draft, found_both = drafted(path, sandbox)
            derived, written = moved(found_both.derived), moved(found_both.written)
            found = Row(name, draft.schedules, derived, written, not found_both.why_small, found_both.why_small)
    except KernelAgentError as error:
        found = Row(name, why=error.message.splitlines()[0].replace(f"{ROOT}/", ""))
    return Row(**{**found.__dict__, "seconds": round(time.perf_counter() - start, 1)})


def drafted(path: Path, sandbox: Sandbox) -> tuple[Draft, Both]:
    """The first draft of one pair's forward, and what both backwards do. Where BENCH takes another configuration of the
    forward than any entry of SWEEP, that is derived, too, as the backward asks for. Raises what the compiler and the
    counter raise."""
    facts = read_file(path)
    spec = describe(facts, sandbox)
    (draft, *_), _ = drafts(spec, sandbox, most=1)
    found = both(facts, read_source(draft.pair, path), sandbox)
    if OTHER_CONFIGURATIONS in found.why_small:
        spec = spec.model_copy(update={"sweep": (*spec.sweep, *facts.bench[:1])})
        (draft, *_), _ = drafts(spec, sandbox, most=1)
        found = both(facts, read_source(draft.pair, path), sandbox)
    return draft, found


@dataclass(frozen=True)
class Both:
    """What two backwards do at one entry."""

    derived: EntryCost
    written: EntryCost
    why_small: str
    """Why it is not one of BENCH; empty where it is."""


def both(written: FileFacts, derived: FileFacts, sandbox: Sandbox) -> Both:
    """The two backwards at one entry. Raises what the counter raises where neither entry can be counted."""
    try:
        why = "it has no BENCH"
        if written.bench:
            return Both(counted(at_bench(derived), sandbox, 0), counted(at_bench(written), sandbox, 0), why_small="")
    except KernelAgentError as error:  # the smaller entry will do
        why = error.message.splitlines()[0]
    place = largest_required(describe(written, sandbox).sweep)
    return Both(counted(derived, sandbox, place), counted(written, sandbox, place), why)


def at_bench(facts: FileFacts) -> FileFacts:
    """The pair with its BENCH for its SWEEP."""
    return facts.model_copy(update={"source": f"{facts.source.rstrip()}\n\n\nSWEEP = BENCH\n"})


def counted(facts: FileFacts, sandbox: Sandbox, place: int) -> EntryCost:
    """Count a pair at one entry of its SWEEP."""
    (cost,) = costs(facts, sandbox, DEVICE, [place], LIMITS)
    return cost


def moved(cost: EntryCost) -> Moved:
    """What its backward moves."""
    report = cost.parts["backward"]
    return Moved(
        cost.label,
        float(report.unique_bytes),
        float(sum(call.read_bytes + call.written_bytes for call in report.torch)),
        float(sum(launch.issued_bytes for launch in report.launches)),
        float(sum(launch.atomics for launch in report.launches)),
    )


def buffers(path: Path) -> str:
    """What each launch of both backwards does to each buffer, in different bytes."""
    with Sandbox() as sandbox:
        draft, found = drafted(path, sandbox)
    lines = [f"{path.parent.name}/{path.stem}: {', '.join(draft.schedules)}"]
    for title, cost in (("derived", found.derived), ("hand-written", found.written)):
        report = cost.parts["backward"]
        lines.append(f"  {title}, {cost.label}: {moved(cost).traffic / 1e6:.2f} MB")
        for launch in report.launches:
            lines.append(f"    {launch.kernel} {launch.grid}")
            for buffer in launch.buffers:
                kinds = (("read", buffer.read), ("write", buffer.write), ("atomic", buffer.atomic))
                parts = [f"{name} {part.unique_bytes / 1e6:.2f}" for name, part in kinds if part is not None]
                lines.append(f"      {buffer.name:20} {buffer.dtype:9} {', '.join(parts)}")
        for call in report.torch:
            lines.append(f"    {call.name}: read {call.read_bytes / 1e6:.2f}, write {call.written_bytes / 1e6:.2f}")
    return "\n".join(lines)


def read_rows(path: Path) -> dict[str, Row]:
    """Rows by name, the last of each."""
    rows: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        form = json.loads(line)
        for key in ("derived", "written"):
            form[key] = None if form[key] is None else Moved(**form[key])
        rows[form["name"]] = Row(**{**form, "schedules": tuple(form["schedules"])})
    return rows


def told(rows: list[Row]) -> str:
    """The summary."""
    found = [(one.ratio, one) for one in rows if one.ratio is not None and math.isfinite(one.ratio)]
    ratios = sorted(found, key=lambda pair: pair[0])
    lines = [f"{len(rows)} pairs, {len(ratios)} counted"]
    if len(ratios) > 1:
        values = [ratio for ratio, _ in ratios]
        tail = values[math.ceil(0.95 * len(values)) - 1]
        spared = [
            ratio for ratio, one in ratios if one.derived and one.written and one.derived.atomics <= one.written.atomics
        ]
        real = [ratio for ratio, one in ratios if one.real_sizes]
        lines += [
            f"traffic over the hand-written backward's: median {statistics.median(values):.3f} (bar {MEDIAN}), "
            f"95th percentile {tail:.3f} (bar {TAIL}), most {values[-1]:.2f}",
            f"at most {TAIL}: {sum(ratio <= TAIL for ratio in values) / len(values):.1%}",
            f"at sizes of BENCH: {middle(real)}",
            f"no more atomic updates than the hand-written backward: {middle(spared)} "
            f"({len(spared) / len(ratios):.1%})",
            "",
            *reasons([one for ratio, one in ratios if ratio > MEDIAN]),
            "",
            "most traffic:",
        ]
        lines += [f"  {ratio:7.2f}  {one.name}  {', '.join(one.schedules)}" for ratio, one in ratios[::-1][:30]]
    missing = [one for one in rows if one.ratio is None]
    lines += ["", "not counted:"] if missing else []
    lines += [f"  {one.name}: {one.why}" for one in missing]
    small = [one for one in rows if one.ratio is not None and not one.real_sizes]
    lines += ["", f"counted at an entry of SWEEP: {len(small)}"]
    lines += [f"  {one.name}: {one.why}" for one in small if one.why]
    return "\n".join(lines) + "\n"


def middle(ratios: list[float]) -> str:
    """How many, and their median."""
    return f"{len(ratios)}, median {statistics.median(ratios):.3f}" if ratios else "0"


def reasons(rows: list[Row]) -> list[str]:
    """Why pairs move more than they should, by the first reason of each."""
    found = {
        "add atomically what the other stores": 0,
        "fill, convert or sum more in torch": 0,
        "read or store more": 0,
    }
    atomic, torch, launch = found
    for one in rows:
        assert one.derived is not None
        assert one.written is not None
        if one.derived.atomics > one.written.atomics:
            found[atomic] += 1
        elif one.derived.torch_bytes - one.written.torch_bytes > FILLS * one.written.traffic:
            found[torch] += 1
        else:
            found[launch] += 1
    return [f"more than {MEDIAN}: {len(rows)}", *(f"  {reason}: {count}" for reason, count in found.items())]


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take one of so many")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--only", default="", help="take those whose path holds this")
    parser.add_argument("--again", action="store_true", help="count pairs that have a row, too")
    parser.add_argument("--buffers", action="store_true", help="show what both do to every buffer, and keep nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    given = parser.parse_args()
    lines = given.out.with_suffix(".jsonl")
    known = read_rows(lines)
    pairs = [path for path in sorted(PAIRS.glob("*/*.py")) if read_meta(path.read_text()).gradient is Gradient.TRUE]
    chosen = [path for path in pairs if given.only in str(path)][:: given.every][: given.limit]
    if given.buffers:
        for path in chosen:
            print(buffers(path), flush=True)
        return
    left = [path for path in chosen if given.again or f"{path.parent.name}/{path.stem}" not in known]
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool, lines.open("a") as out:
        running = {pool.submit(row, path): path for path in left}
        for number, future in enumerate(as_completed(running), 1):
            one = future.result()
            known[one.name] = one
            out.write(json.dumps(asdict(one)) + "\n")
            out.flush()
            ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
            print(f"{number}/{len(left)} {one.name} {ratio} {one.why[:120]} {one.seconds:.0f} s", flush=True)
    rows = [known[name] for name in sorted(known)]
    lines.write_text("".join(json.dumps(asdict(one)) + "\n" for one in rows))
    text = told(rows)
    given.out.with_suffix(".txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
