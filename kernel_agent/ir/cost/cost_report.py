"""What a call costs, as records: traffic, arithmetic, trips, and the time that no implementation of it can beat."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_agent.ir.cost.counting import How
from kernel_agent.ir.cost.devices import device_table
from kernel_agent.ir.cost.work import Work
from kernel_agent.quantities import duration


class Resource(str, enum.Enum):
    """What a launch can be bound by."""

    MEMORY = "memory"
    TENSOR = "tensor cores"
    FLOAT = "float units"
    DOUBLE = "double units"
    SPECIAL = "special functions"


@dataclass(frozen=True)
class Traffic:
    """How one buffer is touched in one way."""

    unique_bytes: int
    """Bytes of different elements: what has to come from device memory once, if caches keep the rest."""
    issued_bytes: int
    """Bytes of all valid lanes, each as often as a program touches it."""
    sector_bytes: int
    """Bytes of 32-byte sectors behind them, each once per program and access; far above `issued_bytes`, and accesses
    are not coalesced."""


@dataclass(frozen=True)
class BufferCost:
    """One buffer in one launch."""

    name: str
    """Name of the argument."""
    dtype: str
    size_bytes: int
    """Of the whole storage."""
    read: Traffic | None
    write: Traffic | None
    atomic: Traffic | None

    @property
    def unique_bytes(self) -> int:
        """Bytes that cross to or from device memory at least."""
        return sum(part.unique_bytes for part in (self.read, self.write, self.atomic) if part)


@dataclass(frozen=True)
class WorkCost:
    """Arithmetic of one kind."""

    kind: Work
    operations: int
    """A multiplication and an addition are two."""


@dataclass(frozen=True)
class LoopCost:
    """One loop of a kernel."""

    line: int | None
    """Line of the kernel's source."""
    variable: str
    """The loop counter, or the first variable the loop carries."""
    minimum: int
    """Fewest iterations in one program, over all times it reaches the loop."""
    mean: float
    maximum: int
    entries: float
    """How often a program reaches the loop, on average."""


@dataclass(frozen=True)
class BoundTerm:
    """How long one resource is busy at least."""

    resource: Resource
    detail: str
    """Kinds of arithmetic, for units that compute."""
    seconds: float

    def __str__(self) -> str:
        what = f"{self.resource.value} ({self.detail})" if self.detail else self.resource.value
        return f"{what}: {duration(self.seconds)}"


@dataclass(frozen=True)
class Bound:
    """The least time of a launch: that of the resource it keeps busy longest."""

    terms: tuple[BoundTerm, ...]
    """Longest first."""

    @property
    def seconds(self) -> float:
        """The lower bound."""
        return self.terms[0].seconds if self.terms else 0.0

    @property
    def by(self) -> Resource | None:
        """What bounds the launch; None for one that does nothing."""
        return self.terms[0].resource if self.terms else None


@dataclass(frozen=True)
class LaunchCost:
    """One kernel launch."""

    kernel: str
    file: str
    """Where the launch stands; empty when that is unknown."""
    line: int | None
    grid: tuple[int, int, int]
    programs: int
    how: How
    walked: int
    """Programs that were followed to find the figures."""
    spread: float
    """Relative difference between two halves of the sample in different elements; 0 for exact figures."""
    buffers: tuple[BufferCost, ...]
    work: tuple[WorkCost, ...]
    loops: tuple[LoopCost, ...]
    atomics: int
    """Elements updated atomically, each as often as it was."""
    largest_tile: int
    """Elements of the largest tile of numbers in the kernel."""
    fits_l2: bool
    """All its bytes fit into the device's L2 cache: when they are there already, memory does not bound it."""
    bound: Bound

    @property
    def unique_bytes(self) -> int:
        """Bytes that cross to or from device memory at least."""
        return sum(buffer.unique_bytes for buffer in self.buffers)

    @property
    def issued_bytes(self) -> int:
        """Bytes of all lanes of all accesses."""
        parts = [part for b in self.buffers for part in (b.read, b.write, b.atomic) if part]
        return sum(part.issued_bytes for part in parts)

    def operations(self, kind: Work) -> int:
        """Operations of one kind."""
        return next((work.operations for work in self.work if work.kind is kind), 0)


@dataclass(frozen=True)
class TorchCost:
    """Calls of one torch function between launches, coarsely from shapes."""

    name: str
    calls: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class CostReport:
    """What one call of a stub costs."""

    stub: str
    device: str
    """Name in the table of devices."""
    table_date: str
    """Date of that table."""
    launches: tuple[LaunchCost, ...]
    torch: tuple[TorchCost, ...]
    notes: tuple[str, ...]
    """What the figures leave out, or rest on."""

    @property
    def seconds(self) -> float:
        """Least time of all launches one after the other, torch's own kernels not counted."""
        return sum(launch.bound.seconds for launch in self.launches)

    @property
    def whole_seconds(self) -> float:
        """Least time of the launches and of the bytes that torch's own kernels move between them."""
        moved = sum(call.read_bytes + call.written_bytes for call in self.torch)
        return self.seconds + moved / (device_table().find(self.device).bandwidth_gb_s * 1e9)

    @property
    def unique_bytes(self) -> int:
        """Of all launches."""
        return sum(launch.unique_bytes for launch in self.launches)

    @property
    def exact(self) -> bool:
        """Whether no figure is estimated."""
        return all(launch.how is not How.SAMPLED for launch in self.launches)

    def operations(self, kind: Work) -> int:
        """Operations of one kind over all launches."""
        return sum(launch.operations(kind) for launch in self.launches)

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON has them, with the bounds spelt out."""
        form: dict[str, Any] = dataclasses.asdict(self)
        form["seconds"], form["exact"] = self.seconds, self.exact
        for launch, written in zip(self.launches, form["launches"], strict=True):
            by = launch.bound.by
            written["bound"].update(seconds=launch.bound.seconds, by=None if by is None else by.value)
            written["unique_bytes"], written["issued_bytes"] = launch.unique_bytes, launch.issued_bytes
        return form

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> CostReport:
        """The report that `to_dict` wrote."""
        launches = tuple(_launch(launch) for launch in form["launches"])
        torch = tuple(TorchCost(**call) for call in form["torch"])
        return cls(form["stub"], form["device"], form["table_date"], launches, torch, tuple(form["notes"]))

    def __str__(self) -> str:
        from kernel_agent.ir.cost.cost_text import report_text

        return report_text(self)


def _launch(form: Mapping[str, Any]) -> LaunchCost:
    """A launch as `to_dict` wrote it."""
    known = {field.name: form[field.name] for field in dataclasses.fields(LaunchCost)}
    terms = [BoundTerm(Resource(t["resource"]), t["detail"], t["seconds"]) for t in form["bound"]["terms"]]
    known.update(
        grid=tuple(form["grid"]),
        how=How(form["how"]),
        buffers=tuple(_buffer(buffer) for buffer in form["buffers"]),
        work=tuple(WorkCost(Work(work["kind"]), work["operations"]) for work in form["work"]),
        loops=tuple(LoopCost(**loop) for loop in form["loops"]),
        bound=Bound(tuple(terms)),
    )
    return LaunchCost(**known)


def _buffer(form: Mapping[str, Any]) -> BufferCost:
    parts = {kind: None if form[kind] is None else Traffic(**form[kind]) for kind in ("read", "write", "atomic")}
    return BufferCost(form["name"], form["dtype"], form["size_bytes"], **parts)
