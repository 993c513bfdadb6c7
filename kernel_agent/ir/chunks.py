"""Bounded memory for launches of many programs: they run in chunks.

Without recording, and when all that is recorded fits into memory, chunks only keep values small enough for the cache.
Otherwise a chunk is a checkpoint: it runs once without recording, and the backward runs it again from the contents at
the start of the launch, which is exact because programs do not read what others write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.budget import release
from kernel_agent.ir.machine import Machine
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Block, Module
from kernel_agent.ir.types import Kind

Run = Callable[[Machine, Tensor], None]
"""Runs programs (P,) on a machine."""

_LOOPS = frozenset({"scf.for", "scf.while"})
_ITERATIONS = 8
"""How often a loop is taken to run before anything is measured."""
_TILE, _TILE_ON_DEVICE = 1 << 18, 1 << 22
"""Elements of one value at which an operation takes much longer than its call; on the CPU they stay in the cache."""
_SMALL_TILE = 1 << 13
"""Elements below which an operation takes no longer than its call."""


@dataclass(frozen=True)
class Plan:
    """How a launch is cut."""

    checkpoint: bool
    """Whether a launch with gradients runs in chunks that are recorded only when the backward runs them again."""
    budget: int
    """Bytes that may be recorded at one time."""
    together: int
    """Programs per chunk."""
    least: int
    """Programs per chunk below which nothing is gained: loops bound memory by segments of their own."""

    @classmethod
    def of(cls, module: Module, programs: int, memory: int, kept: int, device: torch.device) -> Plan:
        """A plan from the text of the kernel alone. `memory` and what earlier launches recorded are in bytes."""
        tile = _largest_tile(module)
        # the rest is for the adjoints of what is recorded, for copies of buffers and for what operations need
        budget = memory // 4
        together = (_TILE if device.type == "cpu" else _TILE_ON_DEVICE) // tile
        together = min(together, memory // (8 * _elements(module, iterations=1)))
        loops = any(op.name in _LOOPS for op in module.all_ops)
        fits = programs * 8 * _elements(module, iterations=_ITERATIONS) <= budget - kept
        # a single chunk is recorded at once too: its loops run in segments where they must
        alone = loops and programs <= together and kept <= budget // 2
        return cls(
            checkpoint=not fits and not alone,
            budget=budget,
            together=max(1, together),
            least=max(1, min(_SMALL_TILE // tile, together)) if loops else 1,
        )

    def halved(self, programs: int) -> Plan:
        """The same for a device that had not as much memory as it seemed."""
        together = max(1, min(self.together, programs) // 2)
        return replace(
            self, checkpoint=True, budget=max(1, self.budget // 2), together=together, least=min(self.least, together)
        )


@lru_cache(maxsize=256)
def _largest_tile(module: Module) -> int:
    """Elements of the largest tile of numbers that a program computes."""
    sizes = [
        math.prod(result.type.tile)
        for op in module.all_ops
        for result in op.results
        if result.type.kind is Kind.TENSOR and result.type.scalar.kind is not Kind.POINTER
    ]
    return max(sizes, default=1)


@lru_cache(maxsize=512)
def _elements(module: Module, *, iterations: int) -> int:
    """Elements that one program computes when every loop runs so often."""

    def count(blocks: list[Block]) -> int:
        total = 0
        for op in (op for block in blocks for op in block.ops):
            inner = sum(count(region) for region in op.regions)
            total += inner * (iterations if op.name in _LOOPS else 1)
            total += sum(math.prod(result.type.tile) for result in op.results)
        return total

    return max(1, sum(count(function.blocks) for function in module.functions.values()))


def run_checkpointed(machine: Machine, plan: Plan, run: Run, programs: Tensor) -> None:
    """Run in chunks without recording; the backward runs each chunk again with recording.

    What a program computes depends on its loops, so the size of a chunk is learnt from the chunk before.
    """
    buffers = [buffer for buffer in machine.reachable if buffer.is_float]
    # half of the budget: programs of one chunk may run longer than those that were measured
    each = 8 * _elements(machine.module, iterations=_ITERATIONS)
    size = max(plan.least, min(plan.together, plan.budget // 2 // each))
    start, each = 0, 1
    while start < programs.numel():
        part = programs[start : start + size]
        start += part.numel()
        tokens = [machine.tape(buffer).token for buffer in buffers]
        machine.computed = 0
        advanced = Chunk.apply(machine, run, part, buffers, *tokens)
        for buffer, token in zip(buffers, advanced, strict=True):
            machine.tape(buffer).token = token
        each = max(each, machine.computed // part.numel())
        size = max(plan.least, min(4 * size, plan.together, plan.budget // 2 // each))


def _recorded(run: Run, machine: Machine, programs: Tensor) -> bool:
    """Run under recording; False when a device has no memory left for it, and there is something to divide."""
    try:
        with torch.enable_grad():
            run(machine, programs)
    except torch.OutOfMemoryError:
        if programs.numel() == 1:
            raise
    else:
        return True
    machine.tapes.clear()
    release(machine.device)
    return False


class Chunk(torch.autograd.Function):  # type: ignore[misc]
    """(Tokens of all reachable buffers) -> tokens, over a chunk of programs that run independently of the others."""

    @staticmethod
    def forward(
        ctx: Any,
        machine: Machine,
        run: Run,
        programs: Tensor,
        buffers: list[Buffer],
        *tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run, keeping nothing but the contents at the start of the launch."""
        ctx.machine, ctx.run, ctx.programs, ctx.buffers = machine, run, programs, buffers
        with torch.no_grad():
            run(machine, programs)
        return tuple(token.clone() for token in tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Run again from the contents at the start, recorded, on the adjoint buffers of the whole launch."""
        outer: Machine = ctx.machine
        contents = {key: tape.initial for key, tape in outer.tapes.items()}
        waiting = [ctx.programs]
        while waiting:
            part = waiting.pop()
            replay = outer.replay(contents, ctx.buffers, keep=True)
            if _recorded(ctx.run, replay, part):
                ends = replay.ends()
                torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
            else:
                waiting += part.split((part.numel() + 1) // 2)
            replay.close()
        return (None, None, None, None, *[torch.zeros_like(gradient) for gradient in gradients])
