"""Edges of a forward's data-flow graph whose gradient can be changed: what a gradient consists of, term by term.

The exact adjoint is a sum over paths. While `Edges` watches an execution, every floating operand that carries gradients
passes a gate, and so does every value that several operations use. A gate is the identity until a `Change` is put on
its key; the backward passes that follow then apply it. One execution so answers any number of "what if".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_agent.ir.numbering import Numbering
from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.values import Active

RESULT = -1
"""The place of a gate behind an operation, in front of all uses of its result; -2 for its second result, and so on."""


class Key(NamedTuple):
    """A gate, by place in the code: all programs and all rounds of a loop share it."""

    launch: int
    """Which lowered kernel of the execution, counted by first launch."""
    op: int
    """Position in `Module.all_ops`."""
    operand: int
    """Position among the operands, or `RESULT` and below."""


@dataclass(eq=False)
class Occurrence:
    """One execution of one operation."""

    op: Op
    number: int
    """How often the operation ran before, in this execution."""
    operands: tuple[Any, ...]
    """Values as they were, detached."""
    result: Tensor | None = None
    arriving: Tensor | None = None
    """Gradient of the result in the backward pass that runs now."""


Change = Callable[[Tensor, Occurrence, int], "Tensor | None"]
"""(gradient that passes, operation, operand) -> what passes instead; None for nothing."""


def scaled(factor: float) -> Change:
    """A term counted `factor` times."""
    return (lambda *_: None) if factor == 0 else (lambda gradient, *_: gradient * factor)


class _Gate(torch.autograd.Function):  # type: ignore[misc]
    """The identity; its gradient is what the change on its key makes of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, edges: Edges, key: Key, occurrence: Occurrence) -> Tensor:
        """Pass on."""
        ctx.edges, ctx.key, ctx.occurrence = edges, key, occurrence
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Pass on what the change lets through."""
        if ctx.key.operand == RESULT:
            ctx.occurrence.arriving = gradient
        change = ctx.edges.changes.get(ctx.key)
        return (gradient if change is None else change(gradient, ctx.occurrence, ctx.key.operand)), None, None, None


@dataclass(eq=False)
class Edges:
    """The gates of one execution."""

    numbering: Numbering = field(default_factory=Numbering)
    met: dict[Key, Op] = field(default_factory=dict)
    """Every gate that some gradient can pass, in the order of execution."""
    changes: dict[Key, Change] = field(default_factory=dict)
    occurrences: dict[tuple[int, int], list[Occurrence]] = field(default_factory=dict)
    """By kernel and operation, in the order of execution; of operations whose result carries gradients."""

    @property
    def modules(self) -> Sequence[Module]:
        """The kernels in the order of their first launches."""
        return self.numbering.modules

    def compute(
        self, module: Module, op: Op, operands: list[Any], active: Active, run: Callable[..., Any]
    ) -> list[Any]:
        """The results of an operation between gates; `run` is `Machine.compute`."""
        launch, place = self.numbering.of(module, op)
        ran = self.occurrences.setdefault((launch, place), [])
        occurrence = Occurrence(op, len(ran), tuple(v.detach() if isinstance(v, Tensor) else v for v in operands))
        passed = [
            self._gate(value, Key(launch, place, position), occurrence) if _differentiable(value) else value
            for position, value in enumerate(operands)
        ]
        results = list(run(op, passed, active))
        for number, result in enumerate(results):
            if _differentiable(result):
                if number == 0:
                    occurrence.result = result.detach()
                    ran.append(occurrence)
                results[number] = self._gate(result, Key(launch, place, RESULT - number), occurrence)
        return results

    @contextlib.contextmanager
    def changed(self, changes: Mapping[Key, Change]) -> Iterator[None]:
        """Apply changes to the backward passes inside of the block."""
        self.changes = dict(changes)
        try:
            yield
        finally:
            self.changes = {}

    def _gate(self, value: Tensor, key: Key, occurrence: Occurrence) -> Tensor:
        self.met.setdefault(key, occurrence.op)
        return _Gate.apply(value, self, key, occurrence)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
