"""Prints a kernel, lets Triton read it, and runs what Triton made of it."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.emit import KernelSource, triton_source
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.ir import ExecOptions, Execution, execute, import_module

_numbers = itertools.count()


def execution(
    kernel: Kernel,
    source: KernelSource,
    folder: Path,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    *,
    sanitize: bool = False,
) -> Execution:
    """What the printed kernel does. The result holds the tensors, in the order of `arguments`."""
    path = folder / f"printed_{next(_numbers)}.py"
    path.write_text(source.module_text)
    module = import_module(path, f"emit_{path.stem}")
    constants = {name: kernel.constants[name] for name in source.constexprs}

    def stub(tensors: dict[str, Tensor]) -> list[Tensor]:
        given = {name: tensors.get(name, arguments.get(name)) for name in source.parameters if name not in constants}
        getattr(module, source.name)[grid](**given, **constants)
        return list(tensors.values())

    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return execute(stub, (tensors,), options=ExecOptions(sanitize=sanitize))


def run(kernel: Kernel, folder: Path, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor after the launch, float64."""
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    return dict(zip(names, execution(kernel, triton_source(kernel), folder, grid, arguments).result, strict=True))


def formatted(text: str, folder: Path) -> str:
    """What `ruff format` makes of a text."""
    path = folder / "formatted.py"
    path.write_text(text)
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--isolated", str(path)]
    subprocess.run(ruff, check=True, capture_output=True)
    return path.read_text()


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest one, relative to 1 or theirs, whichever is larger; NaN is NaN."""
    if mine.numel() == 0:
        return 0.0
    mine, theirs = mine.double(), theirs.double()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    apart = (mine - theirs).abs() / theirs.abs().clamp(min=1.0)
    return float(torch.where(same, 0.0, apart.nan_to_num(nan=math.inf)).max())
