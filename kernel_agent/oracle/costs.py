"""What a file costs at entries of its SWEEP, asked of a child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.ir.cost.cost_report import CostReport
from kernel_agent.oracle.job import run_truth
from kernel_agent.pairs.spec import ArgumentFacts, FileFacts
from kernel_agent.sandbox import Limits, Sandbox

LIMITS = Limits(wall_s=600.0)
"""Counting at real sizes takes seconds; executing where addresses depend on data may take minutes."""


@dataclass(frozen=True)
class EntryCost:
    """One entry of a SWEEP."""

    position: int
    """In SWEEP."""
    entries: int
    """How many SWEEP has."""
    label: str
    """`M=17 N=100`."""
    parts: Mapping[str, CostReport]
    """By `forward` and, for a pair, `backward`."""
    inputs: tuple[ArgumentFacts, ...] = ()
    """The stub's arguments at this entry."""
    outputs: tuple[ArgumentFacts, ...] = ()
    """What it returns at this entry, without what a pair saves."""
    saved_bytes: int = 0
    """Of tensors that a pair's forward saves beside its inputs."""


def costs(
    facts: FileFacts,
    sandbox: Sandbox,
    device: str,
    entries: Sequence[int] = (),
    limits: Limits = LIMITS,
    *,
    apart: bool = False,
) -> list[EntryCost]:
    """Costs at positions in SWEEP, or at all of them.

    With `apart`, floating arguments that are views of one memory get memory of their own, so that the accesses of each
    are counted under its name.

    Raises `InputError` for what is wrong in the file, or an unknown device or position, and `TruthError` for what
    cannot be counted.
    """
    payload = {"facts": facts.model_dump(mode="json"), "device": device, "entries": list(entries), "apart": apart}
    messages = run_truth(sandbox, "cost_child:costs", facts, payload, limits=limits)
    return [
        EntryCost(
            position=message.record["position"],
            entries=message.record["entries"],
            label=message.record["label"],
            parts={name: CostReport.from_dict(form) for name, form in message.record["parts"].items()},
            inputs=tuple(map(ArgumentFacts.model_validate, message.record["inputs"])),
            outputs=tuple(map(ArgumentFacts.model_validate, message.record["outputs"])),
            saved_bytes=message.record["saved_bytes"],
        )
        for message in messages
    ]
