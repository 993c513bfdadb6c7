"""What the truth child on the GPU sends, as records: inputs of a call, and what its gradients are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernel_agent.bench.honest import HonestError
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.sandbox import Message


@dataclass(frozen=True)
class Inputs:
    """One call at a required entry of SWEEP, with real dtypes."""

    entry: ShapeEntry
    arguments: dict[str, Any]
    """See `realdevice.packed`."""
    cotangents: list[str | None]
    """Tensor keys per output."""
    dot_bits: int | None
    """Of the coarsest product in the user's own kernels; None without products."""
    tensors: Mapping[str, Tensor]
    """On the CPU, by key."""

    @property
    def form(self) -> dict[str, Any]:
        """What a child is told."""
        return {
            "entry": self.entry.model_dump(mode="json"),
            "arguments": self.arguments,
            "cotangents": self.cotangents,
            "dot_bits": self.dot_bits,
        }


@dataclass(frozen=True)
class NativeGradient:
    """The truth of one gradient, or output, at one entry."""

    name: str
    truth: Tensor
    """Float64."""
    dtype: torch.dtype
    scale: float
    """S per element."""
    honest: HonestError


@dataclass(frozen=True)
class NativeTruth:
    """What a candidate is held against at one required entry."""

    label: str
    inputs: Inputs
    """What the candidate gets: those of the entry, or of the shrunk one."""
    grads: tuple[NativeGradient, ...]
    outputs: tuple[NativeGradient, ...] = ()
    """The stub's floating outputs, named by position, with the errors of the user's own kernels."""
    notes: tuple[str, ...] = ()
    shrunk: bool = False
    chosen: bool = False
    """Shrunk since `BenchOptions.proof_elements` asks for it, not for want of memory."""

    def joined(self, errors: Mapping[str, HonestError]) -> NativeTruth:
        """The same truth with further honest errors, by gradient."""
        grads = (
            replace(grad, honest=grad.honest.joined(errors[grad.name])) if grad.name in errors else grad
            for grad in self.grads
        )
        return replace(self, grads=tuple(grads))

    @property
    def given(self) -> dict[str, Tensor]:
        """Tensors of the call alone: no candidate ever gets part of the truth."""
        return {
            name: tensor for name, tensor in self.inputs.tensors.items() if not name.startswith(("truth.", "honest."))
        }


def truth_in(message: Message, inputs: Inputs) -> NativeTruth:
    """The truth that a message holds."""
    record, tensors = message.record, message.tensors
    if record["shrunk"]:
        inputs = Inputs(inputs.entry, record["arguments"], record["cotangents"], inputs.dot_bits, tensors)
    grads, outputs = (
        tuple(
            NativeGradient(
                form["name"],
                tensors[f"truth.{prefix}{form['name']}"],
                getattr(torch, form["dtype"]),
                form["scale"],
                HonestError.sent(f"{prefix}{form['name']}", form, tensors),
            )
            for form in record[part]
        )
        for part, prefix in (("grads", ""), ("outputs", "out."))
    )
    return NativeTruth(
        record["label"], inputs, grads, outputs, tuple(record["notes"]), record["shrunk"], record["chosen"]
    )


def inputs_in(message: Message, entry: ShapeEntry) -> Inputs:
    """The inputs that a message holds."""
    record = message.record
    return Inputs(entry, record["arguments"], record["cotangents"], record["dot_bits"], message.tensors)


def errors_in(message: Message) -> dict[str, HonestError]:
    """The honest errors by gradient that a message holds; none where it holds a refusal."""
    return {
        name: HonestError.sent(name, form, message.tensors) for name, form in message.record.get("errors", {}).items()
    }
