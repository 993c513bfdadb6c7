"""Runs one launch: all programs at once, in chunks when that would take too much memory, or one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir import operations
from kernel_agent.ir.findings import Findings
from kernel_agent.ir.machine import Machine
from kernel_agent.ir.memory import Buffer, Leave, Tape
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer import Sanitizer
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import Active, BlockPointer, Pointer, RuntimeValue

__all__ = ["LaunchOptions", "launch", "operations"]


@dataclass(frozen=True)
class LaunchOptions:
    """How a launch is run."""

    sanitize: bool = True
    """Judge unwritten reads and races; bounds are always judged."""
    safe: bool = False
    """See `Machine.safe`."""
    chunk_elements: int = 1 << 22
    """Programs x largest tile that run at once without recording."""
    recorded_elements: int = 1 << 25
    """The same when recording for gradients; larger launches are checkpointed per chunk."""


def launch(
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    buffers: dict[int, Buffer],
    findings: Findings,
    options: LaunchOptions,
) -> None:
    """Run a kernel. `arguments` are one value per parameter of its entry function, scalars as Python numbers.

    `buffers` maps the upper bits of virtual addresses to all buffers a kernel may reach. Buffers are changed in
    place, and under autograd when gradients are enabled. Raises `UnsupportedOp`.
    """
    programs = torch.arange(math.prod(grid))
    if programs.numel() == 0:
        return
    sequential = _order_matters(module)
    recording = torch.is_grad_enabled() and any(buffer.root.requires_grad for buffer in buffers.values())
    limit = options.recorded_elements if recording else options.chunk_elements
    size = 1 if sequential else max(1, limit // _largest_tile(module))
    chunks = programs.split(size)
    checkpoint = recording and len(chunks) > 1 and not sequential
    sanitizer = Sanitizer(module, grid, findings, watch=options.sanitize, races=not sequential)
    machine = Machine(module, grid, buffers, sanitizer, safe=options.safe, keep_initial=checkpoint)
    for chunk in chunks:
        if checkpoint:
            _run_checkpointed(machine, arguments, chunk)
        else:
            _run(machine, arguments, chunk)
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
        is_number = isinstance(given, (bool, int, float))
        values.append(torch.tensor([given], dtype=parameter.type.dtype) if is_number else given)
    machine.environment.clear()
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


def _run_checkpointed(machine: Machine, arguments: Sequence[RuntimeValue], programs: Tensor) -> None:
    """Run a chunk without recording; its backward runs it again with recording."""
    buffers = [buffer for buffer in _reachable(machine, arguments) if buffer.is_float]
    tokens = [machine.tape(buffer).token for buffer in buffers]
    advanced = Chunk.apply(machine, arguments, programs, buffers, *tokens)
    for buffer, token in zip(buffers, advanced, strict=True):
        machine.tape(buffer).token = token


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
        silent = Sanitizer(outer.module, outer.grid, Findings(), watch=False, races=False)
        replay = Machine(outer.module, outer.grid, outer.buffers, silent, safe=outer.safe)
        for tape in outer.tapes.values():
            again = replay.tapes[id(tape.buffer)] = Tape(tape.buffer, tape.initial, keep=True)
            if tape.buffer in ctx.buffers:
                again.shared = tape.adjoint
                again.token = torch.zeros((), dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            _run(replay, ctx.arguments, ctx.programs)
            ends = [tape.token for tape in replay.tapes.values() if tape.token.grad_fn is not None]
            torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
        return (None, None, None, None, *[torch.zeros_like(gradient) for gradient in gradients])
