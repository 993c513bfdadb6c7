"""One forward with gates in its graph, whose exact gradients can be asked for as often as there are questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.edges import Change, Edges, Key, scaled
from kernel_agent.ir.execution import ExecOptions, run_once
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.values import RuntimeValue
from kernel_agent.oracle.child import Stub, arguments_at
from kernel_agent.oracle.records import Point

_MEMORY = 3 << 30
"""Bytes: nothing shall be recomputed in a backward, for there are many."""


@dataclass(frozen=True)
class _Gated:
    """Takes the place of `launch`."""

    edges: Edges

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
        launch(module, grid, arguments, buffers, findings, replace(options, edges=self.edges))


@dataclass(eq=False)
class Adjoint:
    """The graph of one forward at one point."""

    edges: Edges
    leaves: dict[str, Tensor]
    outputs: tuple[Any, ...]
    neutral: tuple[Key, ...] = ()
    """Gates that stay cut: what passes them adds up to nothing, as the maximum that a softmax subtracts. A backward
    leaves it out, so that a term is what remains of a path without it."""

    @classmethod
    def at(cls, stub: Stub, point: Point) -> Adjoint:
        """Execute the forward. Raises `Refused`, and what the executor and the user's code raise."""
        args, kwargs = arguments_at(stub, point)
        places = stub.leaves(args, kwargs)
        for safe in (False, True):
            edges = Edges()
            options = ExecOptions(sanitize=False, memory=_MEMORY)
            execution, tame = run_once(
                stub.function, args, kwargs, tuple(places.values()), options, safe=safe, runner=_Gated(edges)
            )
            if tame:
                break
        leaves = {name: execution.leaves[place] for name, place in places.items()}
        return cls(edges, leaves, stub.outputs(execution.result))

    def gradients(
        self, cotangents: Sequence[Tensor | None], changes: Mapping[Key, Change] | None = None
    ) -> dict[str, Tensor]:
        """The gradients of all leaves for one cotangent (or None) per output, with changes at some gates."""
        chosen = [
            (output, cotangent.to(torch.float64))
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if cotangent is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        if not chosen:
            return {name: torch.zeros_like(leaf) for name, leaf in self.leaves.items()}
        with self.edges.changed({**dict.fromkeys(self.neutral, scaled(0.0)), **(changes or {})}):
            found = torch.autograd.grad(
                [output for output, _ in chosen],
                list(self.leaves.values()),
                [cotangent for _, cotangent in chosen],
                retain_graph=True,
                allow_unused=True,
            )
        return {
            name: (torch.zeros_like(leaf) if grad is None else grad).as_subclass(Tensor)
            for (name, leaf), grad in zip(self.leaves.items(), found, strict=True)
        }


@dataclass(eq=False)
class Trial:
    """One red case."""

    adjoint: Adjoint
    cotangents: tuple[Tensor | None, ...]
    residuals: dict[str, Tensor]
    """Candidate minus truth of every gradient that is wrong here, float64."""
    truth: dict[str, Tensor]
    wrong: frozenset[str] = frozenset()
    """All gradients that are wrong here."""

    def cut(self, *gates: Key) -> dict[str, Tensor]:
        """What passes any of these gates: the truth less the gradients without them."""
        without = self.adjoint.gradients(self.cotangents, dict.fromkeys(gates, scaled(0.0)))
        return {name: truth - without[name] for name, truth in self.truth.items()}

    def beyond(self, other: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What other gradients have more than the truth."""
        return {name: other[name] - truth for name, truth in self.truth.items()}
