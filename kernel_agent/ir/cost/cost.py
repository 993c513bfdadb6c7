"""What a stub costs at the user's real sizes, on any machine: bytes, arithmetic, trips, and a lower bound of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernel_agent.ir.capture.capture import Launch
from kernel_agent.ir.capture.device import standin
from kernel_agent.ir.capture.images import Images, declare, declared_dtype
from kernel_agent.ir.capture.inputs import Inputs
from kernel_agent.ir.capture.signature_names import callable_name
from kernel_agent.ir.cost.cost_report import (
    Bound,
    BoundTerm,
    BufferCost,
    CostReport,
    LaunchCost,
    LoopCost,
    Resource,
    TorchCost,
    Traffic,
    WorkCost,
)
from kernel_agent.ir.cost.counting import Counted, Effort, How, Touch, count, execute_counted
from kernel_agent.ir.cost.devices import Device, device_table
from kernel_agent.ir.cost.footprint import SECTOR
from kernel_agent.ir.cost.ghost import Ghost, NeedsValues
from kernel_agent.ir.cost.ghost_images import META, CountingCapture, GhostCapture, GhostImages
from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.cost.tally import largest_tile, loop_body
from kernel_agent.ir.cost.traffic import TorchMove
from kernel_agent.ir.cost.work import Work
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.values import RuntimeValue

DEFAULT_DEVICE = "H100 SXM"
DEFAULT_EFFORT = Effort()

_UNITS = {
    **{kind: Resource.TENSOR for kind in Work if "dot" in kind.value},
    Work.DOT_FP32: Resource.FLOAT,
    Work.FP16: Resource.FLOAT,
    Work.BF16: Resource.FLOAT,
    Work.FP32: Resource.FLOAT,
    Work.FP64: Resource.DOUBLE,
    Work.SPECIAL: Resource.SPECIAL,
}
"""What does each kind of arithmetic: kinds that share a unit take turns."""


@dataclass(frozen=True)
class Counts:
    """What a call does, on whatever device."""

    stub: str
    launches: tuple[tuple[Launch, Counted], ...]
    moves: tuple[TorchMove, ...]
    result: Any
    """The stub's return value; tensors in it may be without contents."""
    notes: tuple[str, ...] = ()


class _Counter:
    """A `Runner` that counts launches by executing them."""

    def __init__(self) -> None:
        self.counted: list[Counted] = []

    def __call__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        """See `Runner`."""
        self.counted.append(execute_counted(module, grid, arguments, buffers, findings, options))


class _Walker(_Counter):
    """A `Runner` that counts launches without executing them.

    With `values` it executes those that write integers, once they are counted: addresses may depend on them later.
    """

    def __init__(self, effort: Effort, *, values: bool) -> None:
        super().__init__()
        self.effort = effort
        self.values = values
        self.capture: GhostCapture | None = None
        """Who knows which buffers have contents."""

    def __call__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        """See `Runner`."""
        capture = self.capture
        if capture is None:
            raise RuntimeError("a launch before its capture")
        before = set(capture.unknown)
        counted = count(Ghost(module, grid, arguments, buffers, capture.unknown), self.effort)
        self.counted.append(counted)
        touched = [(counted.buffers[place], kind) for place, kind in counted.touched]
        written = [buffer for buffer, kind in touched if kind is not Access.READ]
        looked_at = [buffer for buffer, kind in touched if kind is not Access.WRITE]
        ids = {id(buffer) for buffer in written}
        known = not any(id(buffer) in before - capture.fresh for buffer in looked_at)
        if self.values and known and any(not buffer.is_float for buffer in written):
            launch(module, grid, arguments, buffers, findings, options)
            capture.unknown &= before - ids
        capture.fresh -= ids


def cost(stub: Callable[..., Any], *args: Any, device: str = DEFAULT_DEVICE, **kwargs: Any) -> CostReport:
    """What one call `stub(*args, **kwargs)` costs on a named device, without running it there.

    Tensors may be on any device or on `meta`; floating ones are never read unless an address depends on them. Launches
    too large to be walked whole are sampled, and say so (`LaunchCost.how`). Raises `InputError` for an unknown device,
    `IRError`, and what the stub raises.
    """
    target = device_table().find(device)
    return report(count_call(stub, args, kwargs), target)


def count_call(
    stub: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    effort: Effort = DEFAULT_EFFORT,
) -> Counts:
    """Count one call, with as little data as possible.

    Values of floating arguments are looked at only where an address depends on them. Where one depends on what kernels
    compute, the call is executed in full, and a note says so. Raises `IRError`, and what the stub raises.
    """
    try:
        return walk_call(stub, args, kwargs, effort)
    except NeedsValues as reason:
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            remedy = "Give tensors with values instead of meta tensors."
            raise NeedsValues(reason.message, remedy=remedy, file=reason.file, line=reason.line) from reason
    try:
        return walk_call(stub, args, kwargs, effort, values=True)
    except NeedsValues as reason:
        counts = execute_call(stub, args, kwargs)
        return replace(counts, notes=(f"executed in full at these sizes: {reason.message}",))


def walk_call(
    stub: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    effort: Effort = DEFAULT_EFFORT,
    *,
    values: bool = False,
) -> Counts:
    """Count one call without executing it; `values` lets floating arguments keep theirs. Raises `NeedsValues` too."""
    runner = _Walker(effort, values=values)
    capture = GhostCapture(options=LaunchOptions(sanitize=False), runner=runner, values=values)
    runner.capture = capture
    counts = _counted(stub, args, kwargs or {}, capture, runner, GhostImages(values=values))
    return replace(counts, result=shapes_of_result(counts.result, capture))


def execute_call(stub: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Counts:
    """Execute one call and count everything it does: exact, and as slow as the executor."""
    runner = _Counter()
    capture = CountingCapture(options=LaunchOptions(sanitize=False), runner=runner)
    return _counted(stub, args, kwargs or {}, capture, runner, Images(device=torch.device("cpu")))


def _counted(
    stub: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    capture: CountingCapture,
    runner: _Counter,
    images: Images,
) -> Counts:
    result = captured(stub, args, kwargs, capture, images)
    launches = tuple(zip(capture.launches, runner.counted, strict=True))
    return Counts(callable_name(stub), launches, tuple(capture.moves), result)


def captured(
    stub: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], capture: CountingCapture, images: Images
) -> Any:
    """The return value of a stub that is called under a capture, which keeps its launches."""
    inputs = Inputs(stub, tuple(args), kwargs, (), capture, images)
    with standin(), capture.running():
        return stub(*inputs.args, **inputs.kwargs)


def shapes_of_result(result: Any, capture: GhostCapture) -> Any:
    """A return value as arguments of a later call: tensors whose contents are not known are without them."""
    return tree_map(lambda leaf: _shape_of(leaf, capture) if isinstance(leaf, Tensor) else leaf, result)


def _shape_of(image: Tensor, capture: GhostCapture) -> Tensor:
    """An output for a later call: without contents where they are not known."""
    if image.is_meta or not capture.is_unknown(image):
        return image
    twin = torch.empty_strided(image.size(), image.stride(), dtype=image.dtype, device=META)
    return declare(twin, declared_dtype(image))


def report(counts: Counts, device: Device) -> CostReport:
    """Counts as a report with lower bounds of time on a device."""
    torch_calls: dict[str, list[TorchMove]] = {}
    for move in counts.moves:
        torch_calls.setdefault(move.name, []).append(move)
    summed = [
        TorchCost(name, len(moves), sum(m.read for m in moves), sum(m.written for m in moves))
        for name, moves in torch_calls.items()
    ]
    launches = tuple(_launch_cost(launch, counted, device) for launch, counted in counts.launches)
    return CostReport(counts.stub, device.name, device_table().date, launches, tuple(summed), counts.notes)


def _launch_cost(launch: Launch, counted: Counted, device: Device) -> LaunchCost:
    buffers = tuple(
        BufferCost(
            buffer.name,
            str(buffer.declared).removeprefix("torch."),
            buffer.size * buffer.itemsize,
            *[_traffic(buffer, counted.touched.get((place, kind))) for kind in Access],
        )
        for place, buffer in enumerate(counted.buffers)
    )
    unique = sum(buffer.unique_bytes for buffer in buffers)
    ordered = [kind for kind in Work if counted.work[kind]]
    return LaunchCost(
        launch.kernel,
        launch.file,
        launch.line,
        launch.grid,
        counted.programs,
        counted.how,
        counted.walked,
        counted.spread,
        buffers,
        tuple(WorkCost(kind, round(counted.work[kind])) for kind in ordered),
        tuple(_loop_cost(counted, place) for place in range(len(counted.trips))),
        round(counted.atomics),
        largest_tile(launch.module),
        unique <= device.l2_mb * 2**20,
        _bound(unique, counted, device),
    )


def _traffic(buffer: Buffer, touch: Touch | None) -> Traffic | None:
    if touch is None or not touch.lanes:
        return None
    return Traffic(round(touch.unique * buffer.itemsize), round(touch.issued), round(touch.sectors * SECTOR))


def _loop_cost(counted: Counted, place: int) -> LoopCost:
    trips = counted.trips[place]
    frame = counted.module.place(trips.op)
    carried = [value.variable for value in loop_body(trips.op).arguments]
    variable = next((name for name in carried if name), "")
    line = None if frame is None else frame.line
    return LoopCost(line, variable, trips.minimum, trips.mean, trips.maximum, trips.entries)


def _bound(unique_bytes: int, counted: Counted, device: Device) -> Bound:
    busy: dict[Resource, float] = {Resource.MEMORY: unique_bytes / (device.bandwidth_gb_s * 1e9)}
    detail: dict[Resource, list[str]] = {}
    for kind, operations in counted.work.items():
        rate = device.rate(kind)
        if rate is not None:
            unit = _UNITS[kind]
            busy[unit] = busy.get(unit, 0.0) + operations / rate
            detail.setdefault(unit, []).append(kind.value.removesuffix(" arithmetic").removesuffix(" dot"))
    terms = [
        BoundTerm(unit, ", ".join(detail.get(unit, ())) if unit is not Resource.SPECIAL else "", seconds)
        for unit, seconds in busy.items()
        if seconds > 0 and math.isfinite(seconds)
    ]
    return Bound(tuple(sorted(terms, key=lambda term: -term.seconds)))


__all__ = ["DEFAULT_DEVICE", "Counts", "Effort", "How", "cost", "count_call", "execute_call", "report"]
