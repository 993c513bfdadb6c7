"""`CountedForward`: what prices are worked out from, counted once on the forward at its largest required entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from kernel_agent.pairs.spec import ArgumentFacts, KernelSpec
from kernel_agent.record import Record

if TYPE_CHECKING:
    from kernel_agent.ir.cost.cost_report import Bound, LaunchCost
    from kernel_agent.ir.cost.devices import Device
    from kernel_agent.sandbox import Sandbox

DEFAULT_DEVICE = "H100 SXM"
"""Prices are of it where there is no GPU, or none of the table of devices."""

WALL_S = 120.0
"""Counting takes seconds; a price is not worth the minutes that executing in full may take."""


class PricedDevice(Record):
    """What a price needs of a GPU."""

    name: str
    bandwidth_gb_s: float = Field(description="of device memory, 10**9 bytes per second")
    multiprocessors: int
    clock_mhz: float
    l2_bytes: int = Field(description="that all of L2 gives per clock and multiprocessor")


class CountedReads(Record):
    """How one launch loads one tensor."""

    name: str = Field(description="of the argument; loads of a copy that the stub made of all of it are its loads")
    size_bytes: int = Field(description="of its memory")
    issued_bytes: int = Field(description="of all loads, each as often as it happened")
    unique_bytes: int = Field(description="of different elements")


class CountedForward(Record):
    """A forward in numbers."""

    position: int = Field(description="of the entry in SWEEP")
    label: str
    device: PricedDevice
    inputs: tuple[ArgumentFacts, ...]
    outputs: tuple[ArgumentFacts, ...]
    reads: tuple[CountedReads, ...]
    seconds: float = Field(description="least time of all launches, one after the other")
    computing_s: float = Field(description="least time of all launches, memory left out")
    set_by: tuple[str, ...] = Field(description="what bounds the launches, other than memory")
    notes: tuple[str, ...]


def count_forward(spec: KernelSpec, sandbox: Sandbox, gpu: str) -> CountedForward:
    """Count the forward of a spec, in a child, for a GPU by its name; empty: `DEFAULT_DEVICE`.

    Raises `InputError` and `TruthError` as `oracle.costs.costs` does.
    """
    from kernel_agent.bench.launch_time import L2_BYTES
    from kernel_agent.oracle.costs import costs
    from kernel_agent.pairs.sweep import largest_required
    from kernel_agent.sandbox import Limits

    device = priced_device(gpu)
    limits = Limits(wall_s=WALL_S)
    (found,) = costs(spec.facts, sandbox, device.name, [largest_required(spec.sweep)], limits, apart=True)
    forward = found.parts["forward"]
    return CountedForward(
        position=found.position,
        label=found.label,
        device=PricedDevice(
            name=device.name,
            bandwidth_gb_s=device.bandwidth_gb_s,
            multiprocessors=device.multiprocessors,
            clock_mhz=device.clock_mhz,
            l2_bytes=L2_BYTES,
        ),
        inputs=found.inputs,
        outputs=found.outputs,
        reads=tuple(reads for launch in forward.launches for reads in _reads(launch)),
        seconds=forward.seconds,
        computing_s=sum(_computing(launch.bound) for launch in forward.launches),
        set_by=_set_by(forward.launches),
        notes=forward.notes,
    )


def priced_device(gpu: str) -> Device:
    """What the table of devices says of a GPU."""
    from kernel_agent.errors import InputError
    from kernel_agent.ir.cost.devices import device_table

    table = device_table()
    try:
        return table.find(gpu or DEFAULT_DEVICE)
    except InputError:  # a GPU whose peak rates nobody entered: the default stands in, and every line names it
        return table.find(DEFAULT_DEVICE)


def _reads(launch: LaunchCost) -> list[CountedReads]:
    from kernel_agent.ir.cost.ghost_images import COPY_OF

    return [
        CountedReads(
            name=buffer.name.removeprefix(COPY_OF),
            size_bytes=buffer.size_bytes,
            issued_bytes=buffer.read.issued_bytes,
            unique_bytes=buffer.read.unique_bytes,
        )
        for buffer in launch.buffers
        if buffer.read
    ]


def _computing(bound: Bound) -> float:
    """Seconds that a launch computes at least, memory left out."""
    from kernel_agent.ir.cost.cost_report import Resource

    return max((term.seconds for term in bound.terms if term.resource is not Resource.MEMORY), default=0.0)


def _set_by(launches: tuple[LaunchCost, ...]) -> tuple[str, ...]:
    from kernel_agent.ir.cost.cost_report import Resource

    bound = {launch.bound.by for launch in launches} - {None, Resource.MEMORY}
    return tuple(sorted(resource.value for resource in bound if resource is not None))
