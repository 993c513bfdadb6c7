"""What one walk over programs of a launch counted: blocks, trips of loops, and footprints of buffers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_agent.ir.cost.footprint import Footprint
from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.operations.reinterpret import size_of
from kernel_agent.ir.program import Block, Module, Op, Value
from kernel_agent.ir.sanitizer.lanes import Lanes
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import Active

LOOPS = ("scf.for", "scf.while")


def tile_of(op: Op) -> tuple[int, ...]:
    """Shape of the lanes of an access."""
    return _moved(op).type.tile


def accessed(op: Op) -> Type:
    """Type of the elements of an access."""
    return _moved(op).type.scalar


def _moved(op: Op) -> Value:
    """The value that an access reads or writes."""
    if op.results:
        return op.results[0]
    return op.operands[3 if op.name == "tt.descriptor_scatter" else 1]


class TooMuch(Exception):
    """More lanes would have to be written out than the tally may take."""


class Tally:
    """A `Meter` that adds everything up. With a limit it raises `TooMuch` when that many lanes were written out."""

    def __init__(self, module: Module, programs: Tensor, limit: int | None = None) -> None:
        self.module = module
        self.limit = limit
        self.written = 0
        """Lanes that were written out to be marked."""
        self.programs = programs
        """Linear ids of the programs that are walked, shape (n,), ascending."""
        self.blocks: Counter[int] = Counter()
        """Block identity -> how many programs ran it, each as often as it did."""
        self.buffers: dict[int, Buffer] = {}
        self.touched: dict[int, dict[Access, Footprint]] = defaultdict(dict)
        """Buffer identity -> its footprints."""
        bodies = [loop_body(op) for op in module.all_ops if op.name in LOOPS]
        self.trips = {id(body): torch.zeros(programs.numel(), dtype=torch.int64) for body in bodies}
        """Loop body identity -> iterations of each program."""

    def block(self, block: Block, active: Active) -> None:
        """See `Meter.block`."""
        self.blocks[id(block)] += active.size
        trips = self.trips.get(id(block))
        if trips is not None:
            place = torch.searchsorted(self.programs, active.ids)
            trips.index_add_(0, place, torch.ones_like(place))

    def access(self, kind: Access, op: Op, buffer: Buffer, lanes: Lanes) -> None:
        """See `Meter.access`."""
        masks = [] if lanes.valid is None else [lanes.valid]
        tile = tile_of(op)
        rank = lanes.offset.dim() - 1
        width = min(size_of(accessed(op)), buffer.itemsize)
        self.reach(kind, buffer, [lanes.offset], masks, (1,) * (rank - len(tile)) + tile, lanes.active.size, width)

    def reach(
        self,
        kind: Access,
        buffer: Buffer,
        offsets: Sequence[Tensor],
        masks: Sequence[Tensor],
        tile: tuple[int, ...],
        programs: int,
        width: int,
    ) -> None:
        """`access` with lanes as terms, see `Footprint.add`."""
        if buffer.size == 0:
            return
        kinds = self.touched[id(buffer)]
        self.buffers[id(buffer)] = buffer
        if kind not in kinds:
            kinds[kind] = Footprint(buffer.size, buffer.itemsize)
        self.written += kinds[kind].add(offsets, masks, tile, programs, width)
        if self.limit is not None and self.written > self.limit:
            raise TooMuch


def loop_body(op: Op) -> Block:
    """The block that runs once per iteration."""
    return op.regions[0 if op.name == "scf.for" else 1][0]


def largest_tile(module: Module) -> int:
    """Elements of the largest tile of numbers that a program holds."""
    sizes = [
        result.type.tile
        for op in module.all_ops
        for result in op.results
        if result.type.kind is Kind.TENSOR and result.type.scalar.kind is not Kind.POINTER
    ]
    return max((int(torch.Size(size).numel()) for size in sizes), default=1)
