"""Bounded memory for loops that are long inside one program: they are recorded in segments.

A segment runs once without recording; only the values it starts from are kept, and what it changed in memory. The
backward brings memory back to the start of the segment, runs it again, recorded, and pulls the gradient through. The
segments of a loop are chained by the tokens of all buffers like single accesses are (see `memory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.journal import Journal
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Active, Bits, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

Stretch = Callable[["Machine", "list[RuntimeValue]", Active], "list[RuntimeValue]"]
"""Some iterations: (machine, carried values, active programs) -> carried values after them."""


class Loop:
    """One execution of a loop: decides how many iterations run next, and records them singly or as a segment."""

    def __init__(self, machine: Machine, op: Op | None) -> None:
        self.machine = machine
        self.op = op
        """None for the loop over programs that run one by one."""
        self._start = machine.computed
        self._iterations = 0
        self._each = 0
        """Bytes that recording one iteration keeps, measured."""
        self._carried = 0
        self._journal: Journal | None = None

    def ahead(self, limit: int, remaining: int) -> int:
        """How many iterations to run next, at most `limit`, when (at least) `remaining` are to come."""
        machine = self.machine
        if not machine.recording:
            return limit
        if self._iterations == 0:
            return 1
        if self._journal is None:
            self._each = (machine.computed - self._start) // self._iterations + 1
            if machine.computed + self._each * remaining <= machine.budget:
                return 1
            self._journal = Journal([machine.tape(buffer) for buffer in machine.reachable])
        # half of the budget for the iterations that are replayed at one time; where that leaves too many starts of
        # segments to keep, their number and their length are balanced
        length = machine.budget // 2 // self._each
        if self._carried * remaining > machine.budget // 2 * max(1, length):
            length = math.isqrt(self._carried * remaining // self._each)
        return max(1, min(limit, length))

    def run(self, stretch: Stretch, carried: list[RuntimeValue], active: Active, count: int) -> list[RuntimeValue]:
        """Run `count` iterations."""
        machine = self.machine
        before = machine.computed
        if self._journal is None:
            carried = stretch(machine, carried, active)
        else:
            carried = self._run_segment(self._journal, stretch, carried, active)
            self._each = (machine.computed - before) // count + 1
            machine.computed = before + self._carried
        self._iterations += count
        self._carried = sum(value.nbytes for value in carried if isinstance(value, Tensor))
        return carried

    def end(self) -> None:
        """The loop is over."""
        if self._journal is not None:
            self._journal.end_loop()
            self.machine.computed += self._journal.nbytes

    def _run_segment(
        self, journal: Journal, stretch: Stretch, carried: list[RuntimeValue], active: Active
    ) -> list[RuntimeValue]:
        machine = self.machine
        captured = {place: machine.read(place, active) for place in (self.op.captures if self.op else ())}
        buffers = [buffer for buffer in machine.reachable if buffer.is_float]
        part = _Part(machine, journal, journal.segments, buffers, stretch, carried, captured, active)
        tokens = [machine.tape(buffer).token for buffer in buffers]
        outputs = Segment.apply(part, *tokens, *_floats(carried), *_floats(captured.values()))
        journal.end_segment()
        for buffer, token in zip(buffers, outputs, strict=False):
            machine.tape(buffer).token = token
        floats = iter(outputs[len(buffers) :])
        results = [next(floats) if _is_float(value) else value for value in part.results]
        part.results = []
        if self.op is not None and any(isinstance(value, Bits) for value in (*carried, *captured.values(), *results)):
            raise machine.unsupported(
                self.op, "the loop is too long to be recorded at once, and carries the bits of floats as integers"
            )
        return results


@dataclass(eq=False)
class _Part:
    """One segment: all that is needed to run it again."""

    machine: Machine
    journal: Journal
    number: int
    buffers: list[Buffer]
    """Buffers of floats, in the order of tokens."""
    stretch: Stretch
    carried: list[RuntimeValue]
    captured: dict[int, RuntimeValue]
    """Values from outside of the loop, by id."""
    active: Active
    results: list[RuntimeValue] = field(default_factory=list)

    def forget_graph(self) -> None:
        """Keep values, not how they were computed: the inputs of the autograd node know that."""
        self.carried = [_detached(value) for value in self.carried]
        self.captured = {place: _detached(value) for place, value in self.captured.items()}


def _is_float(value: RuntimeValue) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _floats(values: Any) -> list[Tensor]:
    return [value for value in values if _is_float(value)]


def _detached(value: RuntimeValue) -> RuntimeValue:
    return value.detach() if _is_float(value) else value


def _leaf(value: RuntimeValue, wanted: Iterator[bool]) -> RuntimeValue:
    return value.detach().requires_grad_(next(wanted)) if _is_float(value) else value


class Segment(torch.autograd.Function):  # type: ignore[misc]
    """(Tokens, floats carried in, floats captured) -> (tokens, floats carried out) over some iterations of a loop."""

    @staticmethod
    def forward(ctx: Any, part: _Part, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run without recording."""
        ctx.set_materialize_grads(False)
        with torch.no_grad():
            part.results = part.stretch(part.machine, part.carried, part.active)
        part.forget_graph()
        ctx.part = part
        outputs: list[Tensor] = []
        seen = {id(value) for value in inputs}
        for value in _floats(part.results):  # autograd wants every output to be a tensor of its own
            outputs.append(value.clone() if id(value) in seen else value)
            seen.add(id(value))
        return (*[token.clone() for token in inputs[: len(part.buffers)]], *outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run again from memory as it was at the start, recorded, on the adjoint buffers of the whole launch."""
        part: _Part = ctx.part
        wanted = iter(ctx.needs_input_grad[1 + len(part.buffers) :])
        carried = [_leaf(value, wanted) for value in part.carried]
        captured = {place: _leaf(value, wanted) for place, value in part.captured.items()}
        active = Active(part.active.ids)
        with part.journal.at(part.number) as contents, torch.enable_grad():
            replay = part.machine.replay(contents, part.buffers, keep=False)
            replay.environment.update({place: (active, value) for place, value in captured.items()})
            results = _floats(part.stretch(replay, carried, active))
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, gradients[len(part.buffers) :], strict=True)
                if gradient is not None and result.requires_grad
            ]
            ends = replay.ends()
            if ends or pairs:
                torch.autograd.backward(
                    [*ends, *[result for result, _ in pairs]],
                    [*[torch.zeros_like(end) for end in ends], *[gradient for _, gradient in pairs]],
                )
        replay.close()
        tokens = [torch.zeros_like(part.machine.tape(buffer).token) for buffer in part.buffers]
        return (None, *tokens, *[leaf.grad for leaf in (*_floats(carried), *_floats(captured.values()))])
