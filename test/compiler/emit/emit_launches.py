"""Prints the kernels that a stub launches, and runs each beside its original on the same memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emit_round_trip import difference

from kernel_agent.compiler.emit import KernelSource, triton_source
from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.ir import ExecOptions, import_module
from kernel_agent.ir.capture.build import Build
from kernel_agent.ir.capture.capture import SCENE, Launch
from kernel_agent.ir.execution import run_once
from kernel_agent.ir.launch import launch as run_launch
from kernel_agent.ir.lower import lower
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module

_numbers = itertools.count()


@dataclass(frozen=True)
class Printed:
    """One launch."""

    kernel: Kernel
    source: KernelSource
    build: Build
    """What Triton would compile for the launch of the text."""
    error: float
    """Largest difference of any element of memory, relative to 1 or the original's value, whichever is larger."""


def printed(kernel: Kernel, launched: Launch, folder: Path) -> tuple[KernelSource, Build, dict[str, Any]]:
    """Text of a kernel, what Triton would compile of it for a launch, and the constants of the launch."""
    build = launched.build
    names = [parameter.name for parameter in build.kernel.params]
    constants = {names[path[0]]: value for path, value in build.constants.items() if len(path) == 1}
    types = {name: "i32" if text == "constexpr" else text for name, text in build.types.items()}
    unsigned = [name for name, text in types.items() if str(text).lstrip("*").startswith("u")]
    source = triton_source(kernel, unsigned=unsigned)
    path = folder / f"launched_{next(_numbers)}.py"
    path.write_text(source.module_text)
    function = getattr(import_module(path, f"emit_{path.stem}"), source.name)
    places = {name: place for place, name in enumerate(source.parameters)}
    chosen = {name: "constexpr" if name in source.constexprs else types[name] for name in source.parameters}
    fixed = {(places[name],): constants[name] for name in source.constexprs}
    return source, Build(function, chosen, fixed, (), build.options), constants


def reprinted(folder: Path, stub: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Printed]:
    """Every launch of a call."""
    found: list[Printed] = []

    def runner(module: Module, grid: Any, arguments: Any, buffers: dict[int, Buffer], *rest: Any) -> None:
        actor = SCENE.actor
        assert actor is not None
        launched = actor.launches[-1]
        kernel = read_launch(launched, distinct=False)
        source, build, constants = printed(kernel, launched, folder)
        ours = lower(build.kernel, build.types, build.constants)
        given = dict(constants)
        for value, named in zip(arguments, module.entry.blocks[0].arguments, strict=True):
            given[named.name.lstrip("%")] = value
        before = {key: buffer.root.detach().clone() for key, buffer in buffers.items()}
        run_launch(ours, grid, [given[n] for n in source.parameters if n not in source.constexprs], buffers, *rest)
        after = {key: buffer.root.detach().clone() for key, buffer in buffers.items()}
        for key, buffer in buffers.items():
            buffer.root.copy_(before[key])
        run_launch(module, grid, arguments, buffers, *rest)
        error = max((difference(after[key], buffer.root.detach()) for key, buffer in buffers.items()), default=math.inf)
        found.append(Printed(kernel, source, build, error))

    run_once(stub, args, kwargs, (), ExecOptions(sanitize=False), safe=False, runner=runner)
    return found
