"""Time backwards that the compiler derived, at large shapes on this machine's GPU, beside eager and compiled PyTorch,
and attention beside FlashAttention-2 and cuDNN.

    python bench/backward_speed.py derive --pairs FOLDER            # on any machine: derive, prove, write the pairs
    python bench/backward_speed.py tune --pairs FOLDER --tuned OTHER --seconds 60              # on a GPU
    python bench/backward_speed.py measure --pairs OTHER --out bench/backward_speed.json       # on a GPU
    python bench/backward_speed.py prove --pairs OTHER              # on any machine: the gate judges what was tuned
    python bench/backward_speed.py show --out bench/backward_speed.json

`tune` writes every pair with the numbers that were fastest, or as it was. `measure` judges the real kernels by the
native tier first and prints no time without a green verdict. `--part 0/4` takes every fourth case, so that several GPUs
can share the work: one process for each, told apart by CUDA_VISIBLE_DEVICES. `--seconds` is for one case, its
native judgement included; kernels of attention compile for seconds each, so that it wants twice those of the others.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from flash import Flash, flash

from kernel_agent.bench.clock import Clock
from kernel_agent.bench.measure import measure_source
from kernel_agent.bench.native import check_native
from kernel_agent.bench.records import Basis, Measurement, ShapeTime
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.errors import KernelAgentError
from kernel_agent.oracle import describe
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.sweep import read_sweep
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = BenchOptions(ways=("eager", "compiled"), proof_elements=1 << 24)
ROUNDS = 5
"""Of attention and the fused ones in turn: what one of them takes hangs on how warm the others left the GPU."""
REST_S = 1.0


@dataclass(frozen=True)
class Case:
    """A forward and the shapes its backward is timed at."""

    forward: str
    """File below the repository."""
    entries: tuple[dict[str, Any], ...]
    """Entries of its SWEEP."""

    flash: bool = False
    """PyTorch has the forward as fused attention, which is timed beside it."""

    @property
    def name(self) -> str:
        """Stem of the file."""
        return Path(self.forward).stem


CASES = (
    Case(
        "examples/rmsnorm.py",
        tuple(
            {"batch": 1, "seq": rows, "hidden": columns, "dtype": dtype}
            for rows, columns in ((32768, 4096), (16384, 8192), (8192, 15872))
            for dtype in ("bfloat16", "float32")
        ),
    ),
    Case(
        "examples/layernorm.py",
        tuple(
            {"M": m, "N": n, "dtype": dtype}
            for m, n in ((32768, 4096), (16384, 8192), (8192, 15872))
            for dtype in ("bfloat16", "float32")
        ),
    ),
    Case("examples/softmax.py", tuple({"M": m, "N": n} for m, n in ((16384, 4096), (4096, 32768)))),
    Case("examples/swiglu.py", ({"tokens": 16384, "hidden": 11008, "dtype": "bfloat16"},)),
    Case("examples/cross_entropy.py", ({"M": 32768, "V": 50304, "dtype": "bfloat16"},)),
    Case("examples/rotary.py", ({"B": 8, "T": 4096, "HQ": 32, "HK": 8, "D": 128, "dtype": "bfloat16"},)),
    Case(
        "examples/attention.py",
        tuple(
            {"B": 4, "H": h, "T": 4096, "S": 4096, "D": d, "causal": causal, "dtype": "float16"}
            for h, d in ((32, 64), (16, 128))
            for causal in (False, True)
        ),
        flash=True,
    ),
    Case("datasets/kernel_pairs/matmul/matmul_bias_gelu.py", ({"M": 4096, "N": 4096, "K": 1024, "dtype": "bfloat16"},)),
)


def derive_all(folder: Path, names: list[str]) -> None:
    """Write the derived pair of every case; one that cannot be derived is told and left out."""
    from kernel_agent.compiler.derive import derive
    from kernel_agent.compiler.tuning.tune import fixed_tiles

    folder.mkdir(parents=True, exist_ok=True)
    with Sandbox() as sandbox:
        for case in CASES:
            if names and case.name not in names:
                continue
            start = time.monotonic()
            try:
                spec = describe(read_file(ROOT / case.forward), sandbox)
                found = derive(spec, sandbox)
            except KernelAgentError as error:
                print(f"{case.name}: {error.message}", flush=True)
                continue
            (folder / f"{case.name}.py").write_text(found.draft.pair, encoding="utf-8")
            fixed = fixed_tiles(spec, found.draft.pair, sandbox)
            (folder / f"{case.name}.fixed.json").write_text(json.dumps(sorted(fixed)), encoding="utf-8")
            schedules = ", ".join(found.draft.schedules)
            print(f"{case.name}: {schedules}; proven after {time.monotonic() - start:.0f} s", flush=True)


def tune_all(folder: Path, tuned: Path, part: str, names: list[str], seconds: float) -> None:
    """Tune the pairs of a folder for the shapes of their cases, and write them to another one."""
    from kernel_agent.compiler.tuning.tune import tune

    tuned.mkdir(parents=True, exist_ok=True)
    with Sandbox() as sandbox:
        for case in chosen(folder, part, names):
            start, path = time.monotonic(), folder / f"{case.name}.py"
            pair, fixed = path.read_text(encoding="utf-8"), path.with_suffix(".fixed.json")
            try:
                found = tune(
                    describe(read_file(ROOT / case.forward), sandbox),
                    pair,
                    sandbox,
                    seconds=seconds,
                    entries=read_sweep(case.entries, path),
                    fixed=frozenset(json.loads(fixed.read_text())) if fixed.is_file() else None,
                    prove=False,
                    on_line=lambda line, name=case.name: print(f"  {name}: {line}", flush=True),
                )
            except KernelAgentError as error:
                print(f"{case.name}: {error.message}", flush=True)
                (tuned / path.name).write_text(pair, encoding="utf-8")
                continue
            (tuned / path.name).write_text(found.pair, encoding="utf-8")
            print(f"{case.name}: {found.line}; {time.monotonic() - start:.0f} s", flush=True)
            for problem in found.problems[:4]:
                print(f"  {case.name}: not timed: {problem}", flush=True)


def prove_all(folder: Path, names: list[str]) -> None:
    """Have the gate judge the pairs of a folder."""
    from kernel_agent.gate.checking import check

    with Sandbox() as sandbox:
        for case in chosen(folder, "0/1", names):
            spec = describe(read_file(ROOT / case.forward), sandbox)
            verdict = check(spec, (folder / f"{case.name}.py").read_text(encoding="utf-8"), sandbox, diagnose=False)
            print(f"{case.name}: {verdict.status.value} {verdict.message}", flush=True)


def chosen(folder: Path, part: str, names: list[str]) -> list[Case]:
    """Cases whose pairs are in a folder."""
    first, parts = map(int, part.split("/"))
    there = [case for case in CASES if (folder / f"{case.name}.py").is_file() and (not names or case.name in names)]
    return there[first::parts]


def at_case(case: Case, path: Path, sandbox: Sandbox) -> KernelSpec:
    """A pair with the shapes of its case for its SWEEP."""
    facts = read_file(path)
    source = f"{facts.source.rstrip()}\n\n\nSWEEP = {list(case.entries)!r}\n"
    update = {"facts": facts.model_copy(update={"source": source}), "sweep": read_sweep(case.entries, path)}
    return describe(facts, sandbox).model_copy(update=update)


def measured(case: Case, path: Path, sandbox: Sandbox, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per entry; one for all where it is not proven. `known`: rows measured before, for their baselines."""
    spec = at_case(case, path, sandbox)
    source, start = spec.facts.source, time.monotonic()

    def told(step: str) -> None:
        print(f"  {case.name}: {step} after {time.monotonic() - start:.0f} s", flush=True)

    rig = Rig(spec, sandbox, OPTIONS)
    told(f"exact gradients of {len(rig.natives)} entries")
    verdict = check_native(spec, source, sandbox, rig)
    told(f"native tier {verdict.status.value}")
    if not verdict.green:
        return [{"case": case.name, "status": verdict.status.value, "message": verdict.message[:400]}]
    mine = [row for row in known if row["case"] == case.name and row.get("device") == rig.gpu.name]
    if {row["entry"] for row in mine} == {inputs.entry.label for inputs in rig.inputs}:
        keys = ("eager_us", "compiled_us")
        shapes = (ShapeTime(label=row["entry"], median_us=row["us"], **{key: row[key] for key in keys}) for row in mine)
        rig.learn(Measurement(basis=Basis.MEASURED, device=rig.gpu.name, shapes=tuple(shapes)))
    rounds: list[list[ShapeTime]] = []
    fused: list[list[Flash]] = []
    for _ in range(ROUNDS if case.flash else 1):
        found = measure_source(spec, source, sandbox, rig)
        rounds.append(list(found.shapes))
        told(f"{', '.join(f'{shape.median_us:.0f} us' for shape in found.shapes)}")
        if case.flash:
            fused.append([rested(values) for values in case.entries])
            told(f"{fused[-1]}")
    shapes = [middle(turns) for turns in zip(*rounds, strict=True)]
    return [
        {
            "case": case.name,
            "entry": shape.label,
            "status": verdict.status.value,
            "device": found.device,
            "us": round(shape.median_us, 2),
            "spread": round(shape.spread, 4),
            "eager_us": shape.eager_us,
            "compiled_us": shape.compiled_us,
            "bound_us": shape.bound_us,
            **(median_of([one[number] for one in fused]) if fused else {}),
        }
        for number, shape in enumerate(shapes)
    ]


def middle(turns: Sequence[ShapeTime]) -> ShapeTime:
    """The round whose time is the median of all."""
    return sorted(turns, key=lambda shape: shape.median_us)[len(turns) // 2]


def rested(values: dict[str, Any]) -> Flash:
    """Times of the fused ones, after a rest."""
    time.sleep(REST_S)
    return flash(values)


def median_of(turns: Sequence[Flash]) -> dict[str, float | None]:
    """Medians of the fused ones over all rounds."""
    found = {name: [us for turn in turns if (us := getattr(turn, name)) is not None] for name in asdict(turns[0])}
    return {name: statistics.median(times) if times else None for name, times in found.items()}


def copy_gb_s() -> float:
    """What a copy of 2 GiB moves per second, bytes read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    clock = Clock(256 << 20)

    def work() -> object:
        return target.copy_(source)

    times = sorted(clock.times(work, clock.pace(work, 0.3)))
    return 2 * source.numel() / times[len(times) // 2] * 1e-3


def measure_all(folder: Path, part: str, names: list[str], out: Path, learn: Path | None) -> None:
    """Measure the cases whose pairs are in the folder and write the rows."""
    known = json.loads(learn.read_text(encoding="utf-8"))["rows"] if learn is not None else []
    rows: list[dict[str, Any]] = []
    with Sandbox() as sandbox:
        for case in chosen(folder, part, names):
            try:
                found = measured(case, folder / f"{case.name}.py", sandbox, known)
            except KernelAgentError as error:
                found = [{"case": case.name, "status": type(error).__name__, "message": error.message[:400]}]
            rows += found
            out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(case.name, *(row.get("us", row.get("message")) for row in found), flush=True)
    written = {"rows": rows, "copy_gb_s": round(copy_gb_s(), 1), "device": torch.cuda.get_device_name()}
    out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def show(out: Path) -> None:
    """Print the table of what was measured."""
    written = json.loads(out.read_text(encoding="utf-8"))
    print(
        f"{written['device']}; a copy moves {written['copy_gb_s']:.0f} GB/s; native tier GREEN where a time is shown\n"
    )
    print(f"{'backward':18} {'shape':58} {'us':>9} {'of bound':>8} {'x eager':>8} {'x compile':>9}")
    for row in written["rows"]:
        if row["status"] != "GREEN":
            print(f"{row['case']:18} {row['status']}: {row['message']}")
            continue
        shape = re.sub(r"\s+", " ", row["entry"])
        ratios = [row[key] / row["us"] if row[key] else None for key in ("bound_us", "eager_us", "compiled_us")]
        bound, eager, compiled = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        line = f"{row['case']:18} {shape:58} {row['us']:9.1f} {bound:>8} {eager:>8} {compiled:>9}"
        fused = [(name, row.get(f"{name}_us")) for name in ("flash", "cudnn")]
        print(line, *(f"  x {name} {us / row['us']:.2f}" for name, us in fused if us), sep="")


def main() -> None:
    """Derive, measure or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("derive", "tune", "measure", "prove", "show"))
    parser.add_argument("--pairs", type=Path, default=Path("generated/derived"))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--tuned", type=Path, default=Path("generated/tuned"))
    parser.add_argument("--seconds", type=float, default=90.0, help="for the numbers of one case, all in all")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument(
        "--learn", type=Path, help="rows measured before: their times of eager and compiled PyTorch are taken"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "backward_speed.json")
    options = parser.parse_args()
    if options.what == "derive":
        derive_all(options.pairs, options.only)
    elif options.what == "tune":
        tune_all(options.pairs, options.tuned, options.part, options.only, options.seconds)
    elif options.what == "prove":
        prove_all(options.pairs, options.only)
    elif options.what == "measure":
        measure_all(options.pairs, options.part, options.only, options.out, options.learn)
    else:
        show(options.out)


if __name__ == "__main__":
    main()
