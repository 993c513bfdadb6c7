"""Prints how long the executor takes on a CUDA device and on the CPU for causal attention, forward and backward.

    python bench/executor_on_gpu.py [--cpu]

Float64, so an H100 computes products at up to 67 TFLOP/s; the sanitizer is on. `--cpu` runs the first shape there, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from kernel_agent.ir import execute, import_module

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHAPES = ((1, 8, 2048, 64), (1, 8, 4096, 64), (2, 16, 8192, 64))


def measure(device: str, shape: tuple[int, ...]) -> str:
    """One line with seconds and peak memory."""
    attention = import_module(EXAMPLES / "attention.py", "bench_attention").attention
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=generator).to(device) for _ in range(3)]
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    done = execute(attention, (*args, True, shape[-1] ** -0.5), leaves=[0, 1, 2])
    output = done.result[0] if isinstance(done.result, tuple) else done.result
    output.sum().item()
    forward = time.perf_counter() - start
    output.backward(torch.ones_like(output))
    done.leaves[0].grad.sum().item()
    both = time.perf_counter() - start
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
    return f"{device:5} attention {shape}: forward {forward:.2f} s, with backward {both:.2f} s{peak}"


def main() -> None:
    """Measure all shapes on the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if options.cpu:
        print(measure("cpu", SHAPES[0]))
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    measure("cuda", (1, 1, 256, 64))
    for shape in SHAPES:
        print(measure("cuda", shape), flush=True)


if __name__ == "__main__":
    main()
