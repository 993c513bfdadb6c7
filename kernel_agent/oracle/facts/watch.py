"""Runs a stub once and writes down where every access of its kernels went: the numbers that all facts are made of."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir import standin
from kernel_agent.ir.capture.capture import Capture, Compiled, Launch
from kernel_agent.ir.capture.images import Images
from kernel_agent.ir.capture.inputs import Inputs
from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Block, Module, Op
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.sanitizer.lanes import Lanes
from kernel_agent.ir.sanitizer.views import Geometry
from kernel_agent.ir.values import Active, RuntimeValue

MOST = 1 << 22
"""Lanes that are written down for one launch; what comes after them is only counted."""


@dataclass(frozen=True)
class Visit:
    """One execution of an access by some programs."""

    programs: Tensor
    """Linear ids, shape (P,), int64."""
    offset: Tensor
    """Elements of the buffer, shape (P or 1, *tile), tile dimensions lazily broadcast."""
    valid: Tensor | None
    """Which lanes take part, broadcast against `offset`; None for all."""


@dataclass
class Site:
    """One access of a launch: an operation of the IR and a buffer it touches."""

    op: Op
    kind: Access
    buffer: Buffer
    shown: Geometry
    """Sizes and strides of the tensor that the kernel was given."""
    visits: list[Visit] = field(default_factory=list)
    masked: bool = False
    """Some lane of it took no part."""


@dataclass(frozen=True)
class Given:
    """What one launch was given."""

    kernel: str
    tensors: Mapping[str, Geometry]
    """By parameter."""
    constants: Mapping[str, int]
    """Whole-number constexprs by name."""
    grid: tuple[int, ...]


@dataclass
class Seen:
    """One launch as it ran."""

    launch: Launch
    given: Given
    sites: list[Site]
    trips: Mapping[int, Tensor]
    """Identity of a loop's operation -> how often each program (P,) ran its body."""
    complete: bool
    """Every lane was written down."""

    @property
    def programs(self) -> int:
        """How many there are."""
        return math.prod(self.launch.grid)


@dataclass(frozen=True)
class Watched:
    """One call of the stub."""

    launches: tuple[Seen, ...]
    inputs: Mapping[str, Tensor]
    """Images of the tensor arguments by name, as the call left them."""
    buffers: Mapping[str, Buffer]
    """Of the inputs that some kernel or view touched, by name."""
    outputs: tuple[Any, ...]
    """What the stub returned, flat."""
    output_buffers: Mapping[int, int]
    """Identity of a buffer -> position of the output that lies in it."""


class _Tape:
    """A `Meter` that writes accesses down."""

    def __init__(self, module: Module, programs: int) -> None:
        self.sites: dict[tuple[int, int], Site] = {}
        self.left = MOST
        loops = [op for op in module.all_ops if op.name in ("scf.for", "scf.while")]
        self._bodies = {id(op.regions[0 if op.name == "scf.for" else 1][0]): id(op) for op in loops}
        self.trips: dict[int, Tensor] = {id(op): torch.zeros(programs, dtype=torch.int64) for op in loops}

    def block(self, block: Block, active: Active) -> None:
        """See `Meter.block`."""
        loop = self._bodies.get(id(block))
        if loop is not None:
            self.trips[loop].index_add_(0, active.ids, torch.ones_like(active.ids))

    def access(self, kind: Access, op: Op, buffer: Buffer, lanes: Lanes) -> None:
        """See `Meter.access`."""
        site = self.sites.get((id(op), id(buffer)))
        if site is None:
            shown = buffer.extents.whole if lanes.view is None else lanes.view.shown
            site = self.sites[id(op), id(buffer)] = Site(op, kind, buffer, shown)
        lanes_here = math.prod(lanes.shape) * (lanes.active.size if lanes.shape[0] == 1 else 1)
        self.left -= lanes_here
        if self.left >= 0:
            valid = None if lanes.valid is None or bool(lanes.valid.all()) else lanes.valid.clone()
            site.masked = site.masked or valid is not None
            site.visits.append(Visit(lanes.active.ids, lanes.offset, valid))


class Watch(Capture):
    """A capture that keeps what launches were given, and with `run` false skips them: shapes are then all it learns."""

    def __init__(self, *, run: bool = True) -> None:
        options = LaunchOptions(sanitize=False)
        super().__init__(grad=False, poison=False, options=options, runner=self._watched)
        self.run = run
        self.given: list[Given] = []
        self.tapes: list[_Tape] = []

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """See `Capture.launch`."""
        given, values = self._given(kernel, grid, args, kwargs)
        compiled = super().launch(kernel, grid, args, kwargs) if self.run else Compiled(kernel, values)
        self.given.append(given)
        return compiled

    def _given(
        self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Given, dict[str, Any]]:
        own = {key: value for key, value in kwargs.items() if key in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **own)
        bound.apply_defaults()
        values = {name: self._argument(value) for name, value in bound.arguments.items()}
        with torch._C.DisableTorchFunction():
            tensors = {
                name: Geometry.of(base)
                for name, value in values.items()
                if isinstance(base := getattr(value, "base", value), Tensor)
            }
        constants = {
            parameter.name: values[parameter.name]
            for parameter in kernel.params
            if parameter.is_constexpr and type(values.get(parameter.name)) is int
        }
        sizes = grid(dict(values)) if callable(grid) else grid
        sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
        return Given(kernel.fn.__name__, tensors, constants, tuple(int(size) for size in sizes)), values

    def _watched(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        tape = _Tape(module, math.prod(grid))
        self.tapes.append(tape)
        launch(module, grid, arguments, buffers, findings, options, tape)


def watch(stub: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watched:
    """Run the stub once in float64. Raises `IRError`, and what the stub raises."""
    capture = Watch()
    inputs = Inputs(stub, args, kwargs, (), capture, Images(device=torch.device("cpu")))
    with standin(), capture.running():
        result = stub(*inputs.args, **inputs.kwargs)
    launches = tuple(
        Seen(done, given, list(tape.sites.values()), tape.trips, tape.left >= 0)
        for done, given, tape in zip(capture.launches, capture.given, capture.tapes, strict=True)
    )
    images = inputs.images()
    buffers = {name: found for name, image in images.items() if (found := capture.known_buffer(image)) is not None}
    outputs = tuple(tree_leaves(result))
    places = defaultdict(list)
    for place, output in enumerate(outputs):
        if isinstance(output, Tensor) and (found := capture.known_buffer(output)) is not None:
            places[id(found)].append(place)
    return Watched(launches, images, buffers, outputs, {key: found[0] for key, found in places.items()})


def shapes_only(stub: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Given, ...]:
    """What every launch of the stub is given, with none of them run. Raises what the stub raises."""
    capture = Watch(run=False)
    inputs = Inputs(stub, args, kwargs, (), capture, Images(device=torch.device("cpu")))
    with standin(), capture.running():
        stub(*inputs.args, **inputs.kwargs)
    return tuple(capture.given)
