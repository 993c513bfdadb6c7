"""Runs one launch on another device than the one its buffers are on: they travel there and back, under autograd."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import BlockPointer, Pointer, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.launch import LaunchOptions, Runner


def launch_on(
    device: torch.device,
    runner: Runner,
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    buffers: dict[int, Buffer],
    findings: Findings,
    options: LaunchOptions,
) -> None:
    """`runner(...)` with copies of the reachable buffers on `device`; what changes there is copied back."""
    reached = reachable(module, arguments, buffers)
    twins = {id(buffer): _twin(buffer, device) for buffer in reached}
    versions = {id(buffer): twins[id(buffer)].root._version for buffer in reached}
    there = {key: twins[id(buffer)] for key, buffer in buffers.items() if id(buffer) in twins}
    runner(
        module,
        grid,
        [_readdressed(value, twins) for value in arguments],
        there,
        findings,
        replace(options, device=device),
    )
    for buffer in reached:
        twin = twins[id(buffer)]
        if twin.root._version != versions[id(buffer)]:
            buffer.root.copy_(twin.root.to(buffer.root.device))
        if buffer.written is not None and twin.written is not None:
            buffer.written.copy_(twin.written)


def reachable(module: Module, arguments: Sequence[RuntimeValue], buffers: dict[int, Buffer]) -> list[Buffer]:
    """Buffers that arguments point to, or all when a kernel makes or reads pointers."""
    if _makes_pointers(module):
        return list(buffers.values())
    found: dict[int, Buffer] = {}
    for value in arguments:
        pointer = value.base if isinstance(value, BlockPointer) else value
        if isinstance(pointer, Pointer) and pointer.buffer is not None:
            found[id(pointer.buffer)] = pointer.buffer
    return list(found.values())


@lru_cache(maxsize=64)
def _makes_pointers(module: Module) -> bool:
    """Whether a kernel makes pointers of numbers, or reads them."""
    made = (op for op in module.all_ops if op.name in ("tt.int_to_ptr", "tt.load"))
    return any(op.results[0].type.scalar.kind is Kind.POINTER for op in made)


def _twin(buffer: Buffer, device: torch.device) -> Buffer:
    twin = copy.copy(buffer)
    twin.root = buffer.root.to(device, copy=True)
    twin.written = None if buffer.written is None else buffer.written.to(device, copy=True)
    return twin


def _readdressed(value: RuntimeValue, twins: dict[int, Buffer]) -> RuntimeValue:
    if isinstance(value, Pointer) and value.buffer is not None:
        return replace(value, buffer=twins[id(value.buffer)])
    if isinstance(value, BlockPointer):
        return replace(value, base=_readdressed(value.base, twins))
    return value
