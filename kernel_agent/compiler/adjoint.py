"""The adjoint of a launch as a reader's text: what `plain` computes, before any schedule, with the user's names."""

from __future__ import annotations

from dataclasses import replace

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.value import Kernel


def adjoint_text(kernel: Kernel, axes: int, read: frozenset[str], written: frozenset[str]) -> str:
    """A kernel that adds every gradient atomically, without its decorator; empty where it cannot be written.

    `axes`: of the launch's grid. `read`, `written`: tensors whose gradients are wanted, and known.
    """
    try:
        adjoint = differentiate(kernel, read=read, written=written)
        (step,) = plans(kernel, adjoint, axes, schedules=("plain",))[0].steps
        printed = triton_source(replace(step.kernel, name=f"{kernel.name}_adjoint"))
    except CannotDerive:
        return ""
    return printed.text.removeprefix("@triton.jit\n")
