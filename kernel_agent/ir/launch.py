"""Runs one launch: all programs at once, in chunks when that would take too much memory, or one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kernel_agent.ir.around import Around
from kernel_agent.ir.budget import OutOfDeviceMemory, release
from kernel_agent.ir.chunks import Plan, run_checkpointed
from kernel_agent.ir.cost.meter import Meter
from kernel_agent.ir.machine import Machine
from kernel_agent.ir.memory import CPU, Buffer, Leave
from kernel_agent.ir.numerics import Numerics
from kernel_agent.ir.operations import atomics
from kernel_agent.ir.program import Module
from kernel_agent.ir.rounding import rounded
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.sanitizer.provenance import written_buffers
from kernel_agent.ir.sanitizer.ranges import division_by_zero
from kernel_agent.ir.sanitizer.sanitizer import Sanitizer
from kernel_agent.ir.sanitizer.sentry import Sentry
from kernel_agent.ir.sanitizer.wraps import find_wraps
from kernel_agent.ir.segments import Loop
from kernel_agent.ir.slopes import Slopes
from kernel_agent.ir.transfer import launch_on, reachable
from kernel_agent.ir.types import STORED_FLOATS
from kernel_agent.ir.values import Active, RuntimeValue, on_device


class Runner(Protocol):
    """`launch`, or what takes its place."""

    def __call__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        """See `launch`."""


@dataclass
class Kept:
    """What the launches of one execution have recorded so far."""

    nbytes: int = 0


@dataclass(frozen=True)
class LaunchOptions:
    """How a launch is run."""

    sanitize: bool = True
    """Judge unwritten reads and races; bounds are always judged."""
    safe: bool = False
    """See `Machine.safe`."""
    memory: int = 1 << 30
    """Bytes that intermediate values may take, about; see `chunks` and `segments`."""
    numerics: Numerics = Numerics.EXACT
    slopes: Slopes | None = None
    """Who watches for infinite derivatives; None when nobody will ask for gradients, or safe mode is on."""
    device: torch.device = CPU
    """Where the buffers are, and everything is computed."""
    kept: Kept = field(default_factory=Kept)
    edges: Around | None = None
    """Who stands around every operation (`Edges`, `Watch`); None when nobody asks what if."""


def launch(
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    buffers: dict[int, Buffer],
    findings: Findings,
    options: LaunchOptions,
    meter: Meter | None = None,
    *,
    chosen: Tensor | None = None,
) -> None:
    """Run a kernel. `arguments` are one value per parameter of its entry function, scalars as Python numbers.

    `buffers` maps the upper bits of virtual addresses to all buffers a kernel may reach. Buffers are changed in
    place, and under autograd when gradients are enabled. A `meter` counts what runs. `chosen` are
    the programs to run, shape (P,), where not all are wanted. Raises `UnsupportedOp`.
    """
    if _order_matters(module) and options.device != CPU:  # one program after another: the host is faster at that
        launch_on(CPU, launch, module, grid, arguments, buffers, findings, options)
        return
    programs = torch.arange(math.prod(grid), device=options.device)
    if chosen is not None:
        programs = chosen.to(options.device)
    if programs.numel() == 0:
        return
    if options.sanitize:
        find_wraps(module, grid, arguments, findings)
    machine = _run_where_it_fits(module, grid, arguments, buffers, findings, options, meter, programs)
    if options.sanitize and (divided := division_by_zero(module, grid, arguments, machine.reached)) is not None:
        place = module.place(divided)
        findings.unpromise(f"{module.entry.name}{f', line {place.line},' if place else ''} divides by zero")
    for tape in machine.tapes.values():
        tape.buffer.changed |= tape.changed
        tape.buffer.read |= not tape.changed
        if tape.changed:
            root = tape.buffer.root
            if tape.token.requires_grad:
                root.copy_(Leave.apply(tape.token, tape).view(root.shape))
            elif tape.keep or tape.padded:  # else the contents are the root itself
                root.copy_(tape.contents[: tape.buffer.size].view(root.shape))
    if machine.records and not machine.keep_initial:
        options.kept.nbytes += machine.computed
    machine.close()


def _run_where_it_fits(
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    buffers: dict[int, Buffer],
    findings: Findings,
    options: LaunchOptions,
    meter: Meter | None,
    programs: Tensor,
) -> Machine:
    """Run the programs, in chunks half as large whenever a device has no memory left. Buffers are not changed yet."""
    plan = Plan.of(module, programs.numel(), options.memory, options.kept.nbytes, options.device)
    while True:
        found = Findings()
        try:
            machine = _judged(module, grid, arguments, buffers, found, options, plan, meter, programs)
        except torch.OutOfMemoryError as error:
            if plan.together == 1 or options.device == CPU:
                kernel = module.entry.name
                raise OutOfDeviceMemory(f"kernel {kernel} does not fit into device memory: {error}") from error
        else:
            findings.take(found)
            return machine
        release(options.device)
        plan = plan.halved(programs.numel())


def _judged(
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    buffers: dict[int, Buffer],
    findings: Findings,
    options: LaunchOptions,
    plan: Plan,
    meter: Meter | None,
    programs: Tensor,
) -> Machine:
    """A machine that has run all programs, and what its sanitizer found. A sentry's suspicion costs a second run."""
    written = written_buffers(module, arguments)
    if options.device != CPU and options.numerics is Numerics.EXACT and meter is None:
        sentry = Sentry(options.device, written, watch=options.sanitize)
        machine = _prepared(module, grid, buffers, arguments, sentry, options, plan, meter)
        _run_all(machine, arguments, programs, plan)
        if not sentry.suspects():
            return machine
    sequential = _order_matters(module)
    sanitizer = Sanitizer(module, grid, findings, watch=options.sanitize, one_by_one=sequential, written=written)
    machine = _prepared(module, grid, buffers, arguments, sanitizer, options, plan, meter)
    _run_all(machine, arguments, programs, plan)
    return machine


def _prepared(
    module: Module,
    grid: tuple[int, int, int],
    buffers: dict[int, Buffer],
    arguments: Sequence[RuntimeValue],
    sanitizer: Sanitizer | Sentry,
    options: LaunchOptions,
    plan: Plan,
    meter: Meter | None,
) -> Machine:
    recording = torch.is_grad_enabled() and any(buffer.root.requires_grad for buffer in buffers.values())
    machine = Machine(
        module,
        grid,
        buffers,
        sanitizer,
        device=options.device,
        safe=options.safe,
        numerics=options.numerics,
        keep_initial=recording and plan.checkpoint and not (_order_matters(module) or _competes(module)),
        quiet=isinstance(sanitizer, Sentry),
        meter=meter,
        slopes=options.slopes,
        edges=options.edges,
    )
    machine.records, machine.budget = recording, max(plan.budget // 2, plan.budget - options.kept.nbytes)
    machine.reachable = reachable(module, arguments, buffers)
    return machine


def _run_all(machine: Machine, arguments: Sequence[RuntimeValue], programs: Tensor, plan: Plan) -> None:
    """Run the programs in checkpoints, one by one, or in chunks."""
    if machine.keep_initial:
        run_checkpointed(machine, plan, lambda machine, part: _run(machine, arguments, part), programs)
    elif _order_matters(machine.module):
        _run_in_order(machine, arguments, programs.split(1))
    elif machine.records and plan.checkpoint:
        _run_in_order(machine, arguments, programs.split(plan.together))
    else:
        for part in programs.split(plan.together):
            _run(machine, arguments, part)


def _run(machine: Machine, arguments: Sequence[RuntimeValue], programs: Tensor) -> None:
    entry = machine.module.entry
    values: list[Any] = []
    for parameter, given in zip(entry.blocks[0].arguments, arguments, strict=True):
        if not isinstance(given, (bool, int, float)):
            values.append(on_device(given, machine.device))
            continue
        if isinstance(given, int) and given >= 1 << 63:  # an unsigned number, held by its bits
            given -= 1 << 64
        value = torch.full((1,), given, dtype=parameter.type.dtype, device=CPU)
        if machine.faithful and isinstance(given, float):
            value = rounded(value, STORED_FLOATS[parameter.type.name])
        values.append(value)
    machine.environment.clear()
    machine.arguments = {
        parameter.id: value for parameter, value in zip(entry.blocks[0].arguments, values, strict=True)
    }
    machine.run_function(entry, values, Active(programs))


def _run_in_order(machine: Machine, arguments: Sequence[RuntimeValue], parts: Sequence[Tensor]) -> None:
    """Run parts of the programs one after the other; a replay starts from memory as the parts before left it."""
    loop, done = Loop(machine, None), 0

    while done < len(parts):
        count = loop.ahead(len(parts) - done, len(parts) - done)
        chosen = parts[done : done + count]

        def run(
            machine: Machine,
            carried: list[RuntimeValue],
            _: Active,
            chosen: Sequence[Tensor] = chosen,
        ) -> list[RuntimeValue]:
            for part in chosen:
                _run(machine, arguments, part)
            return carried

        loop.run(run, [], Active(torch.cat(list(chosen))), count)
        done += count
    loop.end()


@lru_cache(maxsize=64)
def _order_matters(module: Module) -> bool:
    """Whether programs talk to each other: locks and flags, or atomics whose old value is used."""
    return any(
        op.name in ("tt.atomic_cas", "tt.atomic_load", "tt.atomic_poll")
        or (op.name == "tt.atomic_rmw" and op.results[0].id in module.used)
        for op in module.all_ops
    )


@lru_cache(maxsize=64)
def _competes(module: Module) -> bool:
    """Whether programs compete for an element: who wins is known from all programs before, not from a part of them."""
    return any(
        (op.name == "tt.atomic_rmw" and op.attributes["atomic_rmw_op"] in atomics.EXTREMES)
        or (op.name == "tt.descriptor_reduce" and atomics.OF_DESCRIPTORS.get(op.attributes["kind"]) in atomics.EXTREMES)
        for op in module.all_ops
    )
