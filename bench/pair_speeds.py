"""How fast the backwards of the dataset's pairs are at sizes of real workloads, on this machine's GPU.

    python bench/pair_speeds.py --out datasets/results/h100.jsonl [--only TEXT]

For each of the pairs and sizes that `bench/modelled_accuracy.py` lists: real kernels are held to the exact gradients
computed on the GPU (the native tier), then the backward alone is timed (`docs/benchmarking.md`). One JSON object a
line: slug, content hash of the pair, GPU, entry, microseconds, spread, and the cost counter's bound. Retrieval shows
these figures beside a pair. A pair whose native verdict is red is printed and left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from modelled_accuracy import PAIRS, TIMED

from kernel_agent.bench.measure import measure_source
from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.errors import KernelAgentError
from kernel_agent.oracle import describe
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry, content_hash
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox


def at_one_entry(spec: KernelSpec, entry: ShapeEntry) -> KernelSpec:
    """The spec of the same pair with one entry for its SWEEP."""
    source = f"{spec.facts.source.rstrip()}\n\n\nSWEEP = ({entry.dims!r},)\n"
    facts = spec.facts.model_copy(update={"source": source})
    return spec.model_copy(update={"facts": facts, "sweep": (entry,)})


def measured(slug: str, entry: ShapeEntry, sandbox: Sandbox) -> dict[str, object] | None:
    """One line of the result; None, and a printed reason, where there is none."""
    path = PAIRS / f"{slug}.py"
    plain = describe(read_file(path), sandbox)
    spec = at_one_entry(plain, entry)
    rig = Rig(spec, sandbox, BenchOptions(baselines=False))
    verdict = check_native(spec, spec.facts.source, sandbox, rig)
    worst = max((score.ratio for case in verdict.cases for score in case.grads), default=0.0)
    if not verdict.green:
        print(f"{slug} {entry.label}: {verdict.status.value} {verdict.message}\n  {verdict.details[:600]}", flush=True)
        print(*(f"  note: {note}" for note in verdict.notes), sep="\n", flush=True)
        return None
    found = measure_source(spec, spec.facts.source, sandbox, rig)
    (shape,) = found.shapes
    share = f"{shape.bound_us / shape.median_us:.0%} of bound" if shape.bound_us else "no bound"
    print(
        f"{slug} {entry.label}: {shape.median_us:.1f} us, spread {shape.spread:.1%}, {share}, "
        f"worst error {worst:.2f} of the allowed {'; '.join((*verdict.notes, *found.facts))}",
        flush=True,
    )
    if shape.bound_us is None:
        return None
    return {
        "slug": path.stem,
        "hash": content_hash(plain.facts.source),
        "device": found.device,
        "entry": entry.label,
        "backward_us": round(shape.median_us, 2),
        "spread": round(shape.spread, 4),
        "bound_us": round(shape.bound_us, 3),
        "versions": list(found.versions),
    }


def main() -> None:
    """Measure one pair after the other; each line is on disk before the next begins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with Sandbox() as sandbox, options.out.open("w", encoding="utf-8") as file:
        for slug in TIMED:
            if options.only not in slug:
                continue
            entry = read_file(PAIRS / f"{slug}.py").bench[0]
            try:
                row = measured(slug, entry, sandbox)
            except KernelAgentError as error:
                print(f"{slug} {entry.label}: {type(error).__name__}: {error.message}\n  {error.remedy}", flush=True)
                continue
            if row is not None:
                file.write(json.dumps(row) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
