"""Runs the plans of a forward kernel, made by hand, and compares what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
from schedule_kernels import made
from torch import Tensor

from kernel_agent.compiler.front import kernel_of
from kernel_agent.compiler.front.witness import lift
from kernel_agent.compiler.plan import BackwardPlan, Fill
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.schedule.describe import FITS
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.memory import Evaluation
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.lines import HELPERS
from kernel_agent.ir.lower import lower
from kernel_agent.ir.program import Module

PROCESSORS = 2
"""Of the device that expressions of a plan ask for."""
DEVICE = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _: DEVICE_PROPERTIES))
DEVICE_PROPERTIES = SimpleNamespace(multi_processor_count=PROCESSORS)

Made = dict[str, BackwardPlan]


def plans_of(kernel: Kernel, read: str, written: str, axes: int, *, spare: bool = False) -> Made:
    """By schedule, the best first. `spare`: what the forward stored is read back."""
    wanted, given = frozenset(read.split()), frozenset(written.split())
    adjoint = differentiate(kernel, read=wanted, written=given)
    spared = differentiate(prepared(kernel, given).kernel, read=wanted, written=given) if spare else None
    return {plan.schedule: plan for plan in plans(kernel, adjoint, axes, spared=spared)}


def forward(arguments: str, build: Callable[..., Any], **constants: int) -> Kernel:
    """A forward kernel, as `made`."""
    return made(arguments, build, name="forward", **constants)


def from_source(function: Any, signature: Mapping[str, str], **constants: Any) -> Kernel:
    """The kernel of a jitted function. `signature`: Triton's types of what is no constexpr."""
    return kernel_of(_lowered(function, signature, constants), constants=constants)


def named_source(function: Any, signature: Mapping[str, str], **constants: int) -> Kernel:
    """The same, its numbers called by the constexprs that they come from."""
    lifted = lift(lambda values: _lowered(function, signature, values), constants, distinct=False)
    kernel = kernel_of(lifted.module, constants=lifted.values, symbols=lifted.symbols)
    kernel.extents = lifted.extents
    return kernel


def _lowered(function: Any, signature: Mapping[str, str], constants: Mapping[str, Any]) -> Module:
    names = function.arg_names
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    return lower(function, types, {(names.index(name),): value for name, value in constants.items()})


def run(
    plan: BackwardPlan, given: Mapping[str, Any], cotangents: Mapping[str, Tensor], grid: tuple[int, ...], **names: int
) -> tuple[dict[str, Tensor], list[Evaluation]]:
    """Gradients by input, and what each launch accessed. `names`: constexprs; NaN is what nothing was stored to."""
    scope = {**given, **names, "torch": DEVICE, "triton": triton, "min": min, "max": max}
    scope |= {f"grid{axis}": grid[axis] if axis < len(grid) else 1 for axis in range(3)}
    scope |= {argument: cotangents[tensor] for tensor, argument in plan.cotangents.items()}
    exec("\n".join(HELPERS.values()), scope)  # what facts may call
    scope[FITS] = lambda *_: True
    for name, text in plan.settings.items():
        scope[name] = eval(text, scope)
    for fact in plan.facts:
        assert eval(fact.expression, scope), fact
    memory: dict[str, Tensor] = {}
    for buffer in plan.buffers:
        empty = buffer.fill is Fill.EMPTY or (buffer.empty_if and eval(buffer.empty_if, scope))
        start = float("nan") if empty else 0.0
        if buffer.like:
            laid = {**given, **{argument: cotangents[tensor] for tensor, argument in plan.cotangents.items()}}
            memory[buffer.name] = torch.full_like(laid[buffer.like], start)
        else:
            shape = [eval(text, scope) for text in buffer.shape]
            memory[buffer.name] = torch.full(shape, start, dtype=torch.float64)
    memory |= {argument: cotangents[tensor] for tensor, argument in plan.cotangents.items()}
    given = {**{tensor: torch.full_like(value, float("nan")) for tensor, value in cotangents.items()}, **given}
    counts = []
    for step in plan.steps:
        scalars = {name: eval(text, scope) for name, text in step.scalars.items()}
        values = {v.name: {**given, **memory, **scalars}[v.name] for v in step.kernel.arguments}
        extents = tuple(eval(text, scope) for text in step.grid)
        counts.append(evaluate(step.kernel, extents, values, open_lanes=float("nan")))
    for total in plan.totals:
        memory[total.name] = memory[total.partials].sum(0)
    return {tensor: memory[name].view(given[tensor].shape) for tensor, name in plan.gradients.items()}, counts


def agree(
    made_plans: Made, given: Mapping[str, Any], cotangents: Mapping[str, Tensor], grid: tuple[int, ...], **names: int
) -> None:
    """Every plan gives what `plain` gives."""
    truth, _ = run(made_plans["plain"], given, cotangents, grid, **names)
    for schedule, plan in made_plans.items():
        found, _ = run(plan, given, cotangents, grid, **names)
        for tensor, gradient in found.items():
            torch.testing.assert_close(
                gradient, truth[tensor], msg=lambda text, s=schedule, t=tensor: f"{s} d{t}: {text}"
            )


def atomics(plan: BackwardPlan) -> list[str]:
    """What a plan's launches add to atomically."""
    return [op.base.name for step in plan.steps for op in step.kernel.ops if op.code is Code.ATOMIC_ADD]
