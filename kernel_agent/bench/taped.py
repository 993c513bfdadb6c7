"""A user's forward, run in float64 with a graph: what exact and honest gradients are taken from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernel_agent.bench.held_maxima import HeldMaxima
from kernel_agent.bench.realdevice import output_forms, outputs_of
from kernel_agent.ir import ExecOptions, execute
from kernel_agent.oracle.child import Stub
from kernel_agent.oracle.leaves import leaf_call
from kernel_agent.oracle.records import OutputForm
from kernel_agent.pairs.arguments import Arguments

_EXACT = ExecOptions(sanitize=False)


@dataclass(frozen=True)
class Tape:
    """A forward that was run and can be differentiated."""

    leaves: dict[str, Tensor]
    outputs: tuple[Any, ...]
    forms: tuple[OutputForm | None, ...] = ()
    exact_outputs: tuple[Any, ...] = ()
    """Of the stub itself, where a surrogate gives the gradients."""

    @property
    def device(self) -> torch.device:
        """Where it was computed."""
        return next((leaf.device for leaf in self.leaves.values()), torch.device("cpu"))

    def gradients(self, cotangents: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """In the dtype of the leaves; zeros where nothing connects a leaf with an output."""
        chosen = [
            (output, cotangent.to(output.dtype))
            for output, cotangent in zip(self.outputs, cotangents, strict=False)
            if cotangent is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        found: tuple[Tensor | None, ...] = (None,) * len(self.leaves)
        if chosen and self.leaves:
            found = torch.autograd.grad(
                [output for output, _ in chosen],
                list(self.leaves.values()),
                [cotangent for _, cotangent in chosen],
                retain_graph=True,
                allow_unused=True,
            )
        return {
            name: torch.zeros_like(leaf) if grad is None else grad.detach().as_subclass(Tensor)
            for (name, leaf), grad in zip(self.leaves.items(), found, strict=True)
        }


def exact_tape(stub: Stub, arguments: Arguments, places: dict[str, int | str], held: HeldMaxima | None = None) -> Tape:
    """The forward in float64, connected to its leaves but through what is held; of a custom gradient, the
    surrogate's."""
    if stub.spec.custom_gradient:
        outputs = stub.outputs(execute(stub.function, arguments.args, arguments.kwargs, options=_EXACT).result)
        return replace(
            tape_of_gradients(stub, arguments, places), forms=output_forms(stub, outputs), exact_outputs=outputs
        )
    run = execute if held is None else held.execute
    done = run(stub.function, arguments.args, arguments.kwargs, leaves=tuple(places.values()), options=_EXACT)
    outputs = stub.outputs(done.result)
    leaves = {name: done.leaves[place] for name, place in places.items()}
    return Tape(leaves, outputs, output_forms(stub, outputs), outputs)


def tape_of_gradients(
    stub: Stub, arguments: Arguments, places: dict[str, int | str], held: HeldMaxima | None = None
) -> Tape:
    """The same for who asks for gradients alone: a surrogate gives them without the kernels of the forward."""
    if not stub.spec.custom_gradient:
        return exact_tape(stub, arguments, places, held)
    prepared = leaf_call(arguments.args, arguments.kwargs, places)
    with torch.enable_grad():
        result = stub.module.surrogate(*prepared.args, **prepared.kwargs)
    return Tape(prepared.leaves, outputs_of(result))
