"""Runs one launch: all programs at once, in chunks when that would take too much memory, or one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import kernel_agent.ir.operations  # noqa: F401  (fills the registry)
from kernel_agent.ir.findings import Findings
from kernel_agent.ir.machine import Machine
from kernel_agent.ir.memory import CPU, Buffer, Leave, Tape
from kernel_agent.ir.meter import Meter
from kernel_agent.ir.numerics import Numerics
from kernel_agent.ir.program import Block, Module
from kernel_agent.ir.rounding import rounded
from kernel_agent.ir.sanitizer import Sanitizer
from kernel_agent.ir.slopes import Slopes
from kernel_agent.ir.types import STORED_FLOATS, Kind
from kernel_agent.ir.values import Active, BlockPointer, Pointer, RuntimeValue


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


@dataclass(frozen=True)
class LaunchOptions:
    """How a launch is run."""

    sanitize: bool = True
    """Judge unwritten reads and races; bounds are always judged."""
    safe: bool = False
    """See `Machine.safe`."""
    chunk_elements: int = 1 << 21
    """Programs x largest tile that run at once without recording."""
    recorded_elements: int = 1 << 24
    """Elements of intermediate values that are kept when recording; larger launches are checkpointed in chunks."""
    numerics: Numerics = Numerics.EXACT
    slopes: Slopes | None = None
    """Who watches for infinite derivatives; None when nobody will ask for gradients, or safe mode is on."""
    device: torch.device = CPU
    """Where the buffers are, and everything is computed."""


def launch(
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    buffers: dict[int, Buffer],
    findings: Findings,
    options: LaunchOptions,
    meter: Meter | None = None,
) -> None:
    """Run a kernel. `arguments` are one value per parameter of its entry function, scalars as Python numbers.

    `buffers` maps the upper bits of virtual addresses to all buffers a kernel may reach. Buffers are changed in
    place, and under autograd when gradients are enabled. A `meter` counts what runs. Raises `UnsupportedOp`.
    """
    programs = torch.arange(math.prod(grid), device=options.device)
    if programs.numel() == 0:
        return
    sequential = _order_matters(module)
    recording = torch.is_grad_enabled() and any(buffer.root.requires_grad for buffer in buffers.values())
    together = programs.numel() * _elements_per_program(module) <= options.recorded_elements
    checkpoint = recording and not sequential and not together
    sanitizer = Sanitizer(module, grid, findings, watch=options.sanitize, one_by_one=sequential)
    machine = Machine(
        module,
        grid,
        buffers,
        sanitizer,
        device=options.device,
        safe=options.safe,
        numerics=options.numerics,
        keep_initial=checkpoint,
        meter=meter,
        slopes=options.slopes,
    )
    if checkpoint:
        _run_checkpointed(machine, arguments, programs, options.recorded_elements)
    else:
        chunk = max(1, options.chunk_elements // _largest_tile(module))
        for part in programs.split(1 if sequential else programs.numel() if recording else chunk):
            _run(machine, arguments, part)
    for tape in machine.tapes.values():
        if tape.changed:
            root = tape.buffer.root
            if tape.token.requires_grad:
                root.copy_(Leave.apply(tape.token, tape).view(root.shape))
            elif tape.contents.data_ptr() != root.data_ptr():
                root.copy_(tape.contents.view(root.shape))


def _run(machine: Machine, arguments: Sequence[RuntimeValue], programs: Tensor) -> None:
    entry = machine.module.entry
    values: list[Any] = []
    for parameter, given in zip(entry.blocks[0].arguments, arguments, strict=True):
        if not isinstance(given, (bool, int, float)):
            values.append(given.map(lambda part: part.to(machine.device, non_blocking=True)))
            continue
        value = torch.full((1,), given, dtype=parameter.type.dtype, device=machine.device)
        if machine.faithful and isinstance(given, float):
            value = rounded(value, STORED_FLOATS[parameter.type.name])
        values.append(value)
    machine.environment.clear()
    machine.arguments = {
        parameter.id: value for parameter, value in zip(entry.blocks[0].arguments, values, strict=True)
    }
    machine.run_function(entry, values, Active(programs))


def _order_matters(module: Module) -> bool:
    """Whether programs talk to each other: locks, or atomics whose old value is used."""
    return any(
        op.name == "tt.atomic_cas" or (op.name == "tt.atomic_rmw" and op.results[0].id in module.used)
        for op in module.all_ops
    )


def _largest_tile(module: Module) -> int:
    """Elements of the largest float tile a program computes."""
    sizes = [
        math.prod(result.type.tile)
        for op in module.all_ops
        for result in op.results
        if result.type.kind is Kind.TENSOR and result.type.scalar.kind is not Kind.POINTER
    ]
    return max(sizes, default=1)


def _elements_per_program(module: Module) -> int:
    """A guess, from the text alone, of what one program computes: the body of a loop counts eight times."""

    def count(blocks: list[Block]) -> int:
        total = 0
        for op in (op for block in blocks for op in block.ops):
            inner = sum(count(region) for region in op.regions)
            total += inner * (8 if op.name in ("scf.for", "scf.while") else 1)
            total += sum(math.prod(result.type.tile) for result in op.results)
        return total

    return max(1, sum(count(function.blocks) for function in module.functions.values()))


def _run_checkpointed(
    machine: Machine, arguments: Sequence[RuntimeValue], programs: Tensor, recorded_elements: int
) -> None:
    """Run in chunks without recording; the backward runs each chunk again with recording.

    What a program computes depends on its loops, so the size of a chunk is learnt from the chunk before.
    """
    buffers = [buffer for buffer in _reachable(machine, arguments) if buffer.is_float]
    size = max(1, recorded_elements // _elements_per_program(machine.module))
    start = 0
    while start < programs.numel():
        part = programs[start : start + size]
        start += part.numel()
        tokens = [machine.tape(buffer).token for buffer in buffers]
        machine.computed = 0
        advanced = Chunk.apply(machine, arguments, part, buffers, *tokens)
        for buffer, token in zip(buffers, advanced, strict=True):
            machine.tape(buffer).token = token
        each = machine.computed // part.numel() + 1
        size = min(4 * size, max(1, recorded_elements // each))


def _reachable(machine: Machine, arguments: Sequence[RuntimeValue]) -> list[Buffer]:
    """Buffers that arguments point to, or all when a kernel makes pointers from integers."""
    if any(op.name == "tt.int_to_ptr" for op in machine.module.all_ops):
        return list(machine.buffers.values())
    found: dict[int, Buffer] = {}
    for value in arguments:
        pointer = value.base if isinstance(value, BlockPointer) else value
        if isinstance(pointer, Pointer) and pointer.buffer is not None:
            found[id(pointer.buffer)] = pointer.buffer
    return list(found.values())


class Chunk(torch.autograd.Function):  # type: ignore[misc]
    """(Tokens of all reachable buffers) -> tokens, over a chunk of programs that run independently of the others."""

    @staticmethod
    def forward(
        ctx: Any,
        machine: Machine,
        arguments: Sequence[RuntimeValue],
        programs: Tensor,
        buffers: list[Buffer],
        *tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run, keeping nothing but the contents at the start of the launch."""
        ctx.machine, ctx.arguments, ctx.programs, ctx.buffers = machine, arguments, programs, buffers
        with torch.no_grad():
            _run(machine, arguments, programs)
        return tuple(token.clone() for token in tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Run again from the contents at the start, recorded, on the adjoint buffers of the whole launch."""
        outer: Machine = ctx.machine
        silent = Sanitizer(outer.module, outer.grid, Findings(), watch=False)
        replay = Machine(
            outer.module,
            outer.grid,
            outer.buffers,
            silent,
            device=outer.device,
            safe=outer.safe,
            numerics=outer.numerics,
        )
        for tape in outer.tapes.values():
            again = replay.tapes[id(tape.buffer)] = Tape(tape.buffer, tape.initial, keep=True)
            if tape.buffer in ctx.buffers:
                again.shared = tape.adjoint
                again.token.requires_grad_()
        with torch.enable_grad():
            _run(replay, ctx.arguments, ctx.programs)
            ends = [tape.token for tape in replay.tapes.values() if tape.token.grad_fn is not None]
            torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
        return (None, None, None, None, *[torch.zeros_like(gradient) for gradient in gradients])
