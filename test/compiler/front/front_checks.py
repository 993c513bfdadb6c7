"""Runs a stub, and compares what each launch leaves in memory by the executor with what the read kernel leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.front.launch import argument_names
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.ssa.verify import verify
from kernel_agent.ir.capture.capture import SCENE, Launch
from kernel_agent.ir.execution import ExecOptions, run_once
from kernel_agent.ir.launch import launch as run_launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.values import BlockPointer, Pointer


@dataclass
class Compared:
    """One launch."""

    launch: Launch
    kernel: Kernel
    error: float = 0.0
    """Largest difference of any element of any buffer, relative to 1 or the executor's value, whichever is larger."""
    changed: set[str] = field(default_factory=set)
    """Names of buffers that the launch wrote to."""


def compare(
    stub: Callable[..., Any], *args: Any, read: Callable[[Launch], Kernel] | None = None, **kwargs: Any
) -> list[Compared]:
    """Every launch of a call. `read`: how its kernel is read; by default at the launch's own sizes."""
    found: list[Compared] = []

    def runner(module: Any, grid: Any, arguments: Any, buffers: dict[int, Buffer], *rest: Any) -> None:
        actor = SCENE.actor
        assert actor is not None
        launched = actor.launches[-1]
        kernel = read(launched) if read else read_launch(launched, distinct=False)
        verify(kernel)
        before = {key: buffer.root.detach().clone() for key, buffer in buffers.items()}
        ours = {id(buffer): before[key].clone() for key, buffer in buffers.items()}
        evaluate(kernel, grid, _arguments(kernel, launched, arguments, ours))
        run_launch(module, grid, arguments, buffers, *rest)
        compared = Compared(launched, kernel)
        for key, buffer in buffers.items():
            mine, theirs = ours[id(buffer)], buffer.root.detach()
            if not torch.equal(theirs.nan_to_num(1e33), before[key].nan_to_num(1e33)):
                compared.changed.add(buffer.name)
            compared.error = max(compared.error, _difference(mine, theirs))
        found.append(compared)

    run_once(stub, args, kwargs, (), ExecOptions(sanitize=False), safe=False, runner=runner)
    return found


def _difference(mine: Tensor, theirs: Tensor) -> float:
    if mine.numel() == 0:
        return 0.0
    mine, theirs = mine.double(), theirs.double()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    apart = (mine - theirs).abs() / theirs.abs().clamp(min=1.0)
    worst = torch.where(same, 0.0, apart.nan_to_num(nan=math.inf)).max()
    return float(worst)


def _arguments(kernel: Kernel, launched: Launch, given: Any, memory: dict[int, Tensor]) -> dict[str, Any]:
    """What the kernel is given, by name: numbers that Triton made constants are arguments of the kernel again."""
    build = launched.build
    names = [parameter.name for parameter in build.kernel.params]
    found: dict[str, Any] = {names[path[0]]: value for path, value in build.constants.items() if len(path) == 1}
    sources = [part for name, type_ in build.types.items() for part in argument_names(name, type_)]
    values = iter(given)
    for name in sources:
        value = next(values)
        if isinstance(value, BlockPointer):
            found[name] = _tail(value.base, memory)
            for _ in range(2 * len(value.extents)):
                next(values)
            for what, numbers in (("shape", value.extents), ("stride", value.strides)):
                found.update({f"{name}_{what}_{dim}": int(number) for dim, number in enumerate(numbers)})
        elif isinstance(value, Pointer):
            found[name] = _tail(value, memory)
        elif name not in found:
            found[name] = value
    return {value.name: found.get(value.name, 0) for value in kernel.arguments}


def _tail(pointer: Pointer, memory: dict[int, Tensor]) -> Tensor:
    assert pointer.buffer is not None
    return memory[id(pointer.buffer)][int(pointer.offset) :]
