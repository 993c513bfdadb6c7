"""How close the cost counter is to a full execution, and how long it takes.

Prints, for every example (and some pairs of the dataset, forward and backward) at a shape that can be executed: seconds
to count without executing and to execute with counting, how the figures were found, and the largest relative difference
of any byte count, operation count and trip count. Then the same for forced samples, and a matmul of 4096 cubed.

    python bench/cost_accuracy.py [--pairs N] [--volume V]
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from kernel_agent.errors import KernelAgentError
from kernel_agent.ir import standin
from kernel_agent.ir.cost.cost import Counts, Effort, count_call, execute_call, report, walk_call
from kernel_agent.ir.cost.cost_report import CostReport, LaunchCost
from kernel_agent.ir.cost.devices import device_table
from kernel_agent.ir.cost.ghost import NeedsValues
from kernel_agent.oracle.cost_child import part_counts
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.spec import FileFacts, ShapeEntry
from kernel_agent.pairs.sweep import read_sweep
from kernel_agent.pairs.userfile import read_file

ROOT = Path(__file__).parents[1]
DEVICE = device_table().find("H100 SXM")


def volume(entry: ShapeEntry) -> int:
    """Product of whole-number dims."""
    return math.prod(max(value, 1) for value in entry.dims.values() if type(value) is int)


def figures(launch: LaunchCost) -> dict[str, float]:
    """Every number of a launch that a sample estimates."""
    found: dict[str, float] = {}
    for buffer in launch.buffers:
        for kind, part in (("read", buffer.read), ("write", buffer.write), ("atomic", buffer.atomic)):
            if part is not None:
                found[f"{buffer.name} {kind} unique"] = part.unique_bytes
                found[f"{buffer.name} {kind} issued"] = part.issued_bytes
                found[f"{buffer.name} {kind} sectors"] = part.sector_bytes
    found.update({work.kind.value: work.operations for work in launch.work})
    found.update({f"trips {place}": loop.mean for place, loop in enumerate(launch.loops)})
    return found


def difference(one: CostReport, other: CostReport) -> tuple[float, str]:
    """The largest relative difference of any figure, and which one it is."""
    worst, name = 0.0, ""
    for a, b in zip(one.launches, other.launches, strict=True):
        first, second = figures(a), figures(b)
        for key in first.keys() | second.keys():
            x, y = first.get(key, 0.0), second.get(key, 0.0)
            apart = abs(x - y) / max(abs(y), 1e-12)
            if apart > worst:
                worst, name = apart, f"{a.kernel} {key}"
    return worst, name


def compare(name: str, module: ModuleType, facts: FileFacts, entry: ShapeEntry) -> Iterator[str]:
    """One line per part of a file."""
    with standin():
        arguments = build_arguments(module, entry, device="cpu", seed=0)
    start = time.perf_counter()
    try:
        walked = part_counts(module, facts, arguments, walk_call)
    except NeedsValues as reason:
        yield f"{name:<44} {'needs values: ' + reason.message}"
        return
    middle = time.perf_counter()
    executed = part_counts(module, facts, arguments, execute_call)
    end = time.perf_counter()
    for part, counts in walked.items():
        worst, what = difference(report(counts, DEVICE), report(executed[part], DEVICE))
        yield (
            f"{name + ' ' + part:<44} {entry.label[:40]:<40} {middle - start:7.2f} s {end - middle:7.2f} s "
            f"{hows(counts):<8} {worst:8.3%} {what}"
        )


def hows(counts: Counts) -> str:
    """`WALKED` or whatever else the launches were."""
    return "+".join(sorted({counted.how.name for _, counted in counts.launches}))


def largest_executable(module: ModuleType, facts: FileFacts, limit: int) -> ShapeEntry:
    """The entry with most work up to a limit, else the smallest."""
    sweep = sorted(read_sweep(module.SWEEP, facts.path), key=volume)
    return [entry for entry in sweep if volume(entry) <= limit][-1:][0] if volume(sweep[0]) <= limit else sweep[0]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24, help="pairs of the dataset, spread over its families")
    parser.add_argument("--volume", type=int, default=20_000_000, help="largest product of dims that is executed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = sorted((ROOT / "datasets" / "kernel_pairs").glob("*/*.py"))
    chosen = pairs[:: max(1, len(pairs) // options.pairs)][: options.pairs] if options.pairs else []
    print(f"{'file':<44} {'entry':<40} {'count':>9} {'execute':>9} {'how':<8} {'differs':>8} where")
    with tempfile.TemporaryDirectory() as folder:
        for path in [*sorted((ROOT / "examples").glob("*.py")), *chosen]:
            name = path.stem if path.parent.name == "examples" else f"{path.parent.name}/{path.stem}"
            try:
                facts = read_file(path)
                module = load_truth(facts, Path(folder), source=facts.source)
                for line in compare(name, module, facts, largest_executable(module, facts, options.volume)):
                    print(line, flush=True)
            except KernelAgentError as error:
                print(f"{name:<44} {error.message}", flush=True)
        samples(Path(folder))


def samples(folder: Path) -> None:
    """Forced samples of examples against all programs, and the time of a large matmul."""
    sizes = {
        "matmul": ((2000, 1000), (1000, 3000)),
        "attention": ((2, 8, 4096, 64),) * 3,
        "layernorm": ((4000, 1000), (1000,), (1000,)),
        "softmax": ((4000, 1000),),
        "swiglu": ((4096, 11008),) * 2,
    }
    print("\nforced samples of at most 192 programs against all programs")
    for name, shapes in sizes.items():
        facts = read_file(ROOT / "examples" / f"{name}.py")
        stub = getattr(load_truth(facts, folder), facts.stub)
        args = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes]
        whole = report(count_call(stub, args), DEVICE)
        counts = count_call(stub, args, effort=Effort(budget=1, sample=192))
        worst, what = difference(report(counts, DEVICE), whole)
        print(f"{name:<44} {shapes[0]!s:<40} {hows(counts):<8} {worst:8.3%} {what}")
    facts = read_file(ROOT / "examples" / "matmul.py")
    stub = getattr(load_truth(facts, folder), facts.stub)
    a = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    start = time.perf_counter()
    counts = count_call(stub, (a, a.clone()))
    print(f"\nmatmul 4096 x 4096 x 4096, fp16: {time.perf_counter() - start:.2f} s, {hows(counts)}")
    print(report(counts, DEVICE))


if __name__ == "__main__":
    main()
