"""Are honest backwards ever refused? `python bench/honest.py [--jobs 32] [--native [--small]] [--pairs NAME ...]`.

Every pair of the dataset is proven in the exact tier, so each red verdict here is a false alarm of the native tier's
rule, a kernel that loses precision, or one that fails on a device. Judged are the required entries of SWEEP and of
BENCH, made small, and one entry more in each dtype of the pair's META that none of them has: without a GPU by the
pair's own kernels in faithful arithmetic, rounded to nearest and once more with functions that are off by what PTX
permits; with `--native` by real kernels at BENCH, or with `--small` at SWEEP and in each further dtype of META.
`--derived` takes what the compiler derives of the forward in place of the pair's backward.

Every pair is a process of its own and a line of `--out` (JSON) when it is done; a second run goes on with those that
lack one, and prints the table of all. A truth whose execution on the GPU is not done in time, such as that of a loop
over thousands of steps, is computed again of a smaller entry, and the verdict says of which.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from kernel_agent.bench.faithful_call import FaithfulCall
from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.collection.measuring import at_bench
from kernel_agent.compiler.derive import drafts
from kernel_agent.errors import KernelAgentError
from kernel_agent.ir import standin
from kernel_agent.oracle import describe
from kernel_agent.oracle.child import Stub
from kernel_agent.oracle.fit import fit_entry
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.spec import FileFacts, KernelSpec, ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[1]
PAIRS, EXAMPLES = ROOT / "datasets" / "kernel_pairs", ROOT / "examples"
UNJUDGED = "UNJUDGED"
PATIENCE = 20.0
"""Seconds for a process to end its children."""
VOLUME = 64
"""Product of all dims at most, in elements of the arguments."""
PROOFS = (1 << 24, 1 << 20, 1 << 16)
"""Elements of the arguments of a native proof at most: as for the dataset's figures, and where that takes too long."""


@dataclass(frozen=True)
class Judged:
    """One backward at one entry."""

    pair: str
    entry: str
    dtype: str
    way: str
    """`faithful`, `approximated` or `native`."""
    status: str
    """`GREEN`, a status of the gate, or the name of what was raised."""
    ratios: dict[str, float]
    """Worst error of each gradient over the allowed one."""
    message: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def in_every_dtype(spec: KernelSpec) -> list[ShapeEntry]:
    """The required entries of SWEEP, and the first of them in each dtype of META that none of them has."""
    asked = [entry for entry in spec.sweep if entry.required]
    dtypes = {_dtype(entry) for entry in asked}
    more = [name for name in read_meta(spec.facts.source).dtypes if name not in dtypes] if spec.facts.is_pair else []
    return asked + [asked[0].model_copy(update={"dims": {**asked[0].dims, "dtype": name}}) for name in more]


def entries_of(spec: KernelSpec, module: ModuleType, elements: int) -> Iterator[ShapeEntry]:
    """Required entries of SWEEP and of BENCH, made small, and one entry for each further dtype of META."""
    seen: set[str] = set()
    for entry in (*in_every_dtype(spec), *spec.facts.bench):
        fit = fit_entry(
            entry,
            lambda entry: build_arguments(module, entry, device="cpu", seed=0),
            max_elements=elements,
            max_volume=elements * VOLUME,
        )
        if not fit.refusal and fit.entry.label not in seen:
            seen.add(fit.entry.label)
            yield fit.entry


def _dtype(entry: ShapeEntry) -> str:
    return str(entry.dims.get("dtype", "float32")).removeprefix("torch.")


def faithful(path: Path, facts: FileFacts, pair: str, elements: int) -> Iterator[Judged]:
    """Judge the backward of `pair`, the text of a pair file, at all entries without a GPU."""
    with tempfile.TemporaryDirectory() as folder, standin():
        module = load_truth(facts, Path(folder), source=facts.source)
        spec = observe(facts)
        stub = Stub(spec, module, module.forward if facts.is_pair else getattr(module, facts.stub))
        candidate = module if pair == facts.source else load_truth(facts, Path(folder), source=pair)
        for entry in entries_of(spec, module, elements):
            start = time.monotonic()
            try:
                call = FaithfulCall.of(stub, entry, build_arguments(module, entry, device="cpu", seed=0))
                for way, draw in (("faithful", None), ("approximated", 1)):
                    verdict = call.judge(candidate, draw)
                    problem = verdict.problem
                    yield Judged(
                        path.stem,
                        entry.label,
                        _dtype(entry),
                        way,
                        "GREEN" if problem is None else problem.status.value,
                        {score.grad: score.ratio for score in verdict.scores},
                        "" if problem is None else problem.message,
                        verdict.notes,
                        round(time.monotonic() - start, 1),
                    )
                    start = time.monotonic()
            except Exception as error:  # the pair's own code, or an operation that nobody executes: a line, and on
                said = f"{type(error).__name__}: {error}"[:500]
                yield Judged(path.stem, entry.label, _dtype(entry), "faithful", UNJUDGED, {}, said)


def native(path: Path, facts: FileFacts, pair: str, sandbox: Sandbox, options: argparse.Namespace) -> Iterator[Judged]:
    """Judge the real kernels of `pair` on this machine's GPU: at SWEEP, or at BENCH where there is one."""
    start = time.monotonic()
    spec = describe(facts, sandbox)
    if options.small:
        spec = spec.model_copy(update={"sweep": tuple(in_every_dtype(spec))})
    elif facts.bench:
        spec = at_bench(spec)
    rig = Rig(spec, sandbox, BenchOptions(proof_elements=options.proof, device=options.device))
    verdict = check_native(spec, pair if pair != facts.source else spec.facts.source, sandbox, rig)
    for case in verdict.cases:
        ratios = {score.grad: score.ratio for score in case.grads}
        dtype = next((name for name in ("bfloat16", "float16") if name in case.case), "float32")
        took = round(time.monotonic() - start, 1)
        yield Judged(
            path.stem, case.case, dtype, "native", case.status.value, ratios, case.message, verdict.notes, took
        )
    unjudged = [note for note in verdict.notes if "no exact gradients" in note or "does not run here" in note]
    if unjudged or not verdict.cases:
        said = "; ".join((verdict.message, *unjudged))
        yield Judged(path.stem, "", "", "native", UNJUDGED, {}, said, (*verdict.notes, *rig.notes))


def judge(path: Path, options: argparse.Namespace) -> None:
    """Judge one pair in this process; a line per entry on stdout."""
    with Sandbox() as sandbox:
        try:
            facts = read_file(path)
            pair = drafts(describe(facts, sandbox), sandbox)[0][0].pair if options.derived else facts.source
            if options.native:
                found = native(path, facts, pair, sandbox, options)
            else:
                found = faithful(path, facts, pair, options.elements)
            for one in found:
                print(json.dumps(asdict(one)), flush=True)
        except KernelAgentError as error:
            print(
                json.dumps(asdict(Judged(path.stem, "", "", "", type(error).__name__, {}, error.message))), flush=True
            )


def in_processes(path: Path, options: argparse.Namespace, device: int) -> list[Judged]:
    """What is said of one pair; natively by one process after the other, at smaller entries, until one is in time."""
    rows: list[Judged] = []
    for proof in PROOFS if options.native else PROOFS[:1]:
        rows = in_a_process(path, options, device, proof)
        if any(row.entry for row in rows):
            break
    return rows


def in_a_process(path: Path, options: argparse.Namespace, device: int, proof: int) -> list[Judged]:
    """What a process of its own says of one pair; what it had said when its time was up counts."""
    words = [sys.executable, __file__, "--one", str(path), "--elements", str(options.elements)]
    words += ["--device", str(device), "--proof", str(proof)]
    words += [f"--{name}" for name in ("native", "small", "derived") if getattr(options, name)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, said = process.communicate(timeout=options.limit)
            last = "" if process.returncode == 0 else said.strip()[-300:]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # as by Ctrl-C: it ends its own children first
            try:
                out, _ = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            last = f"not done within {options.limit} s"
    rows = [Judged(**json.loads(line)) for line in out.splitlines() if line.startswith("{")]
    return [*rows, Judged(path.stem, "", "", "", UNJUDGED, {}, last)] if last or not rows else rows


def told(rows: list[Judged]) -> str:
    """The table: verdicts by way and dtype, then every backward that is not green, then the closest of the green."""
    lines = [f"{len({row.pair for row in rows})} pairs, {len(rows)} verdicts"]
    for way, dtype in sorted({(row.way, row.dtype) for row in rows if row.ratios}):
        chosen = [row for row in rows if (row.way, row.dtype) == (way, dtype) and row.ratios]
        worst = sorted(max(row.ratios.values()) for row in chosen)
        counts = ", ".join(f"{n} {status}" for status, n in Counter(row.status for row in chosen).most_common())
        lines.append(
            f"{way} {dtype}: {counts}; worst ratio: median {worst[len(worst) // 2]:.2f}, "
            f"19 of 20 within {worst[int(0.95 * (len(worst) - 1))]:.2f}, largest {worst[-1]:.3g}"
        )
    for title, chosen in (
        ("refused", [row for row in rows if row.ratios and row.status != "GREEN"]),
        ("not judged", [row for row in rows if not row.ratios and row.status != "GREEN"]),
    ):
        lines += ["", f"{title}: {len(chosen)}"] if chosen else []
        lines += [f"  {row.pair} {row.entry} {row.way} {row.status}: {row.message}"[:300] for row in chosen]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--pairs", nargs="*", default=None, help="names; all of them by default")
    parser.add_argument("--every", type=int, default=1, help="take one of so many")
    parser.add_argument("--elements", type=int, default=1 << 14, help="of the arguments of an entry at most")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one pair")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--small", action="store_true", help="with --native: at SWEEP, in each dtype")
    parser.add_argument("--gpus", type=int, default=1, help="pairs are spread over so many")
    parser.add_argument("--derived", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("honest.jsonl"))
    for name, kind, default in (("--one", Path, None), ("--device", int, 0), ("--proof", int, PROOFS[0])):
        parser.add_argument(name, type=kind, default=default, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        judge(options.one, options)
        return
    paths = [*sorted(PAIRS.glob("*/*.py")), *sorted(EXAMPLES.glob("*.py"))]
    if options.pairs is not None:
        paths = [path for path in paths if path.stem in options.pairs]
    elif not options.derived:
        paths = [path for path in paths if path.is_relative_to(PAIRS)]
    rows = [Judged(**json.loads(line)) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {row.pair for row in rows}
    waiting = [path for path in paths[:: options.every] if path.stem not in known]
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a", encoding="utf-8") as file:
        futures = [pool.submit(in_processes, path, options, at % options.gpus) for at, path in enumerate(waiting)]
        for number, future in enumerate(as_completed(futures)):
            found = future.result()
            rows += found
            file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
            file.flush()
            worst = max((ratio for row in found for ratio in row.ratios.values()), default=0.0)
            red = ", ".join(sorted({row.status for row in found if row.status != "GREEN"})) or "green"
            print(f"{number + 1}/{len(waiting)} {found[0].pair}: {red}, worst ratio {worst:.2f}", flush=True)
    print(told(sorted(rows, key=lambda row: (row.pair, row.entry, row.way))))


if __name__ == "__main__":
    main()
