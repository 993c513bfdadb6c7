"""Time the executor of Triton IR against Triton's own interpreter, and against its own bars.

Run: OMP_NUM_THREADS=1 python bench/executor.py bench/executor.json       (the file gets the figures as data)

All seconds are processor time of this tool on one thread of a CPU: how long exact checking takes. They say nothing of
the speed of a kernel on a GPU. Both sides of a ratio are measured in this run, on the same kernel and the same inputs,
after their outputs were compared. Lowering is not timed: it happens once per kernel, and the interpreter has none.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.autodiff import MARK
from kernel_agent.ir import ExecOptions, execute, import_module
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.spec import ShapeEntry

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
RATIO_BAR = 20.0
SHAPES: dict[str, dict[str, Any]] = {
    "attention": {"B": 1, "H": 8, "T": 1024, "S": 1024, "D": 64, "causal": True},
    "attention_block_ptr": {"B": 1, "H": 8, "T": 1024, "D": 64, "causal": True},
    "cross_entropy": {"M": 512, "V": 2000},
    "gated_recurrence": {"B": 2, "H": 8, "T": 64, "K": 64, "V": 64},
    "grouped_gemm": {"M": 1000, "N": 512, "K": 128, "E": 8},
    "layernorm": {"M": 604, "N": 1000},
    "matmul": {"M": 1024, "N": 1024, "K": 256},
    "rmsnorm": {"batch": 4, "seq": 256, "hidden": 512},
    "rotary": {"B": 2, "T": 128, "HQ": 8, "HK": 2, "D": 64},
    "softmax": {"M": 1024, "N": 500},
    "swiglu": {"tokens": 512, "hidden": 1024},
}
"""One shape per example, of the size that its SWEEP asks for or smaller, so that the interpreter needs seconds."""


@dataclass(frozen=True)
class Ratio:
    """One example, forward."""

    example: str
    dims: dict[str, Any]
    interpreter: float
    """Seconds."""
    plain: float
    """Seconds of the executor; bounds are judged."""
    sanitized: float
    """Seconds of the executor with reads of unwritten memory and races judged too."""
    error: float
    """Largest relative RMS difference of an output: the interpreter rounds, the executor does not."""


@dataclass(frozen=True)
class LeftOut:
    """An example that the interpreter cannot run here."""

    example: str
    reason: str
    """Last line of its error. Known: Triton 3.6 with NumPy >= 2.4 cannot loop over `range(0, tensor)`."""


@dataclass(frozen=True)
class Bar:
    """One figure that has an upper limit."""

    name: str
    value: float
    limit: float
    unit: str


def load(example: str, dims: dict[str, Any]) -> tuple[Any, Arguments]:
    """The stub of an example, and its arguments on the CPU."""
    module = import_module(EXAMPLES / f"{example}.py", f"bench_{example}")
    stub = next(value for value in vars(module).values() if callable(value) and hasattr(value, MARK))
    return stub, build_arguments(module, ShapeEntry(dims=dims), device="cpu", seed=0)


def fastest(stub: Any, given: Arguments, options: ExecOptions, repeats: int = 3) -> float:
    """Seconds of the fastest of some calls; the kernel is lowered already."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        execute(stub, given.args, given.kwargs, options=options)
        seconds.append(time.process_time() - start)
    return min(seconds)


def compare(example: str, dims: dict[str, Any]) -> Ratio | LeftOut:
    """Run one example on both sides. Raises when outputs differ by more than rounding explains."""
    stub, given = load(example, dims)
    ours = execute(stub, given.args, given.kwargs)
    if ours.findings:
        raise RuntimeError(f"{example}: {ours.findings[0].message}")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "theirs.pt"
        command = [
            sys.executable,
            str(HERE / "interpreted.py"),
            str(EXAMPLES / f"{example}.py"),
            json.dumps(dims),
            str(target),
        ]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        child = subprocess.run(command, capture_output=True, text=True, env=environment)
        if child.returncode:
            return LeftOut(example, (child.stderr.strip().splitlines() or ["no message"])[-1])
        theirs = torch.load(target)
    total = sum(float(value.double().sum()) for value in given.args if isinstance(value, Tensor))
    if total != theirs["inputs"]:
        raise RuntimeError(f"{example}: the interpreter had other inputs")
    errors = [
        distance(mine, other)
        for mine, other in zip(tree_leaves(ours.result), tree_leaves(theirs["outputs"]), strict=True)
        if isinstance(mine, Tensor)
    ]
    if max(errors) > 1e-3:
        raise RuntimeError(f"{example}: outputs differ by {max(errors):.2g} of their size")
    return Ratio(
        example,
        dims,
        theirs["seconds"],
        fastest(stub, given, ExecOptions(sanitize=False)),
        fastest(stub, given, ExecOptions()),
        max(errors),
    )


def distance(ours: Tensor, theirs: Tensor) -> float:
    """RMS difference over RMS size."""
    ours, theirs = ours.detach().double(), theirs.double()
    return float((ours - theirs).norm() / ours.norm().clamp(min=1e-300))


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def attention_bars() -> None:
    """Print seconds, and MiB by which the peak of memory grows: a fresh process runs this, so nothing else counts."""
    torch.set_num_threads(1)
    small, given = load("attention", {"B": 1, "H": 1, "T": 64, "S": 64, "D": 64, "causal": True})
    execute(small, given.args, given.kwargs, leaves=("q", "k", "v"))
    stub, given = load("attention", {"B": 1, "H": 8, "T": 2048, "S": 2048, "D": 64, "causal": True})
    cotangent = torch.randn(given.args[0].shape, dtype=torch.float64)
    before, start = resident(), time.process_time()
    execution = execute(stub, given.args, given.kwargs, leaves=("q", "k", "v"))
    gradients = torch.autograd.grad(execution.result[0], list(execution.leaves.values()), cotangent)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    print(json.dumps([seconds, (peak - before) / 2**20]))


def bars(ratios: list[Ratio]) -> list[Bar]:
    """The figures that have limits."""
    child = subprocess.run(
        [sys.executable, __file__, "--attention"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds, growth = json.loads(child.stdout)
    norm = next(ratio for ratio in ratios if ratio.example == "layernorm")
    attention = "causal attention N=2048 D=64 H=8 forward + gradients, sanitized"
    return [
        Bar(f"{attention}: time", seconds, 4.0, "s"),
        Bar(f"{attention}: growth of peak memory", growth, 1024.0, "MiB"),
        Bar("layernorm 604x1000 forward", norm.plain, 0.1, "s"),
        Bar("layernorm 604x1000 forward, sanitized", norm.sanitized, 0.1, "s"),
    ]


def show(ratios: list[Ratio], left_out: list[LeftOut], limits: list[Bar], console: Console) -> bool:
    """Print both tables; the result is whether every bar is met."""
    table = Table(title="Forward: the executor against Triton's interpreter, 1 thread")
    for heading in ("example", "shape", "interpreter s", "executor s", "ratio", "sanitized s", "ratio", "difference"):
        table.add_column(heading, justify="left" if heading in ("example", "shape") else "right")
    for row in ratios:
        table.add_row(
            row.example,
            " ".join(f"{name}={value}" for name, value in row.dims.items()),
            f"{row.interpreter:.2f}",
            f"{row.plain:.4f}",
            f"{row.interpreter / row.plain:.0f}x",
            f"{row.sanitized:.4f}",
            f"{row.interpreter / row.sanitized:.0f}x",
            f"{row.error:.0e}",
        )
    console.print(table)
    for missing in left_out:
        console.print(f"left out: {missing.example}, the interpreter fails: {missing.reason}")
    plain = statistics.median(row.interpreter / row.plain for row in ratios)
    sanitized = statistics.median(row.interpreter / row.sanitized for row in ratios)
    console.print(f"median ratio {plain:.1f}x (bar {RATIO_BAR:.0f}x); sanitized {sanitized:.1f}x")
    table = Table(title="Limits")
    for heading in ("what", "measured", "limit"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for bar in limits:
        table.add_row(bar.name, f"{bar.value:.3g} {bar.unit}", f"{bar.limit:g} {bar.unit}")
    console.print(table)
    console.print("Processor time of this tool on a CPU; it says nothing of a kernel's speed on a GPU.")
    return plain >= RATIO_BAR and all(bar.value < bar.limit for bar in limits)


def main() -> int:
    """Measure, print, and write the figures if a file is named."""
    torch.set_num_threads(1)
    compared = [compare(example, dims) for example, dims in SHAPES.items()]
    ratios = [row for row in compared if isinstance(row, Ratio)]
    left_out = [row for row in compared if isinstance(row, LeftOut)]
    limits = bars(ratios)
    met = show(ratios, left_out, limits, Console())
    if len(sys.argv) > 1:
        figures = {
            "command": "OMP_NUM_THREADS=1 python bench/executor.py bench/executor.json",
            "what": "processor seconds of the tool on one CPU thread; not the speed of any kernel on a GPU",
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "numpy": numpy.__version__},
            "ratios": [asdict(ratio) for ratio in ratios],
            "left_out": [asdict(row) for row in left_out],
            "limits": [asdict(bar) for bar in limits],
        }
        Path(sys.argv[1]).write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--attention"]:
        attention_bars()
    else:
        sys.exit(main())
