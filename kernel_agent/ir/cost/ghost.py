"""Walks all programs of a launch without its data: only addresses, masks, loop bounds and conditions are computed.

A launch at the user's real sizes then needs neither its memory nor its arithmetic. Integers that addresses depend on
are read where they are known; where they are not, `NeedsValues` says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernel_agent.ir.cost.address_slice import ACCESSES, AddressSlice, address_slice, mask_of, places_of
from kernel_agent.ir.cost.ghost_loop import Crooked, Vanished, walk_loop
from kernel_agent.ir.cost.lazy import ABSENT, Absent, dense, terms_of
from kernel_agent.ir.cost.lazy_rules import LAZY_RULES
from kernel_agent.ir.cost.meter import Access, Meter
from kernel_agent.ir.cost.tally import accessed, tile_of
from kernel_agent.ir.errors import IRError
from kernel_agent.ir.machine import Machine
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.operations.pointers import targets
from kernel_agent.ir.operations.reinterpret import size_of
from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.sanitizer.sanitizer import Sanitizer
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import Active, BlockPointer, Pointer, RuntimeValue

_PASSES_POINTERS = frozenset(
    {
        "tt.addptr", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.advance",
        "tt.ptr_to_int", "tt.int_to_ptr", "tt.bitcast", "tt.make_tensor_ptr", "tt.make_tensor_descriptor", "tt.call",
        "arith.select", "arith.cmpi", "scf.for", "scf.if", "scf.while", "tt.join", "tt.cat", "tt.gather", "tt.split",
        "llvm.intr.assume", "tt.assert", "tt.print", "ttg.convert_layout",
    }
)  # fmt: skip
"""Operations that take pointers and touch no memory."""


TOGETHER = 1 << 22
"""Elements of one value over all programs that are walked at once."""


class NeedsValues(IRError):
    """Where a launch goes depends on data that nobody has computed."""


class Watcher(Meter, Protocol):
    """Counts a walk. Accesses come as terms."""

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
        """`programs` programs touch `width` bytes per lane of a buffer, see `Footprint.add`."""


@dataclass(frozen=True)
class Walk:
    """What a walk took."""

    elements: int
    """Elements of all values computed."""
    operations: int
    """Operations of the slice, each counted once however many programs ran it together."""
    widest: int
    """Elements of the widest value that a single program had."""


@dataclass(frozen=True)
class Ghost:
    """One launch, ready to be walked."""

    module: Module
    grid: tuple[int, int, int]
    arguments: Sequence[RuntimeValue]
    buffers: dict[int, Buffer]
    unknown: set[int]
    """Identities of buffers whose contents are not known; buffers that the launch writes are added."""

    def walk(self, programs: Tensor, watcher: Watcher, together: int | None = None) -> Walk:
        """Walk programs (n,), `together` at once, by default as many as bounded memory surely allows.

        Raises `NeedsValues` and `UnsupportedOp`.
        """
        slice_ = address_slice(self.module)
        findings = Findings()
        sanitizer = Sanitizer(self.module, self.grid, findings, watch=False)
        machine = GhostMachine(self.module, self.grid, self.buffers, sanitizer, slice_, watcher, self.unknown)
        together = together or max(1, TOGETHER // _largest_tile(self.module, slice_))
        for part in programs.split(together):
            machine.run(self.arguments, part)
        return Walk(machine.elements, machine.operations, machine.widest)


def _largest_tile(module: Module, slice_: AddressSlice) -> int:
    results = [result for op in module.all_ops for result in op.results if result.id in slice_.needed]
    return max((math.prod(result.type.tile) for result in results), default=1)


class GhostMachine(Machine):
    """A machine that computes one slice of a kernel; all other values are `ABSENT`."""

    def __init__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        buffers: dict[int, Buffer],
        sanitizer: Sanitizer,
        slice_: AddressSlice,
        watcher: Watcher,
        unknown: set[int],
    ) -> None:
        super().__init__(module, grid, buffers, sanitizer)
        self.slice = slice_
        self.watcher = watcher
        self.unknown = unknown
        self.elements = 0
        self.operations = 0
        self.widest = 1
        self._untold: list[Callable[[], None]] | None = None
        """What the watcher is not told yet; None when it is told at once."""

    def run(self, arguments: Sequence[RuntimeValue], programs: Tensor) -> None:
        """Walk the kernel for some programs."""
        entry = self.module.entry
        values: list[Any] = []
        for parameter, given in zip(entry.blocks[0].arguments, arguments, strict=True):
            is_number = isinstance(given, (bool, int, float))
            values.append(torch.tensor([given], dtype=parameter.type.dtype) if is_number else given)
        self.environment.clear()
        self.run_function(entry, values, Active(programs))

    def _run_block(self, block: Any, arguments: Sequence[RuntimeValue], active: Active) -> Any:
        if not self.in_lanes:
            self._tell(lambda: self.watcher.block(block, active))
        return super()._run_block(block, arguments, active)

    def compute(self, op: Op, operands: list[RuntimeValue], active: Active) -> Sequence[RuntimeValue]:
        """The results of one operation that are in the slice. Raises `NeedsValues` and `UnsupportedOp`."""
        if op.name in ACCESSES:
            return self._access(op, operands, active)
        if op.name == "scf.for":
            return self._loop(op, operands, active)
        if op.name.startswith("scf.") or op.name == "tt.call":
            return super().compute(op, operands, active)
        if not any(result.id in self.slice.needed for result in op.results):
            if op.name not in _PASSES_POINTERS and any(_is_pointer(value.type.scalar.kind) for value in op.operands):
                raise self._needs(op, f"{op.name} touches memory in a way that cannot be followed without data")
            return [ABSENT] * len(op.results)
        self.operations += 1
        rule = LAZY_RULES.get(op.name)
        found = None if rule is None or self.in_lanes else rule(op, *operands)
        results = super().compute(op, [_dense(v) for v in operands], active) if found is None else [found]
        for result in results:
            if isinstance(result, Tensor):
                self.elements += result.numel()
                self.widest = max(self.widest, result[0].numel())
        return results

    def _loop(self, op: Op, operands: list[RuntimeValue], active: Active) -> Sequence[RuntimeValue]:
        """All iterations at once where that is possible; what an attempt in vain has told is forgotten."""
        told, self._untold = self._untold, []
        try:
            results: Sequence[RuntimeValue] = walk_loop(self, op, operands, active, TOGETHER)
        except Crooked:
            self._untold = told
            return super().compute(op, operands, active)
        except Vanished as vanished:
            self._untold = told
            gone = {3 + place for place in vanished.places}
            left = [ABSENT if place in gone else value for place, value in enumerate(operands)]
            return self._loop(op, left, active)
        finally:
            attempt, self._untold = self._untold, told
        for tell in attempt or ():
            self._tell(tell)
        return results

    def _tell(self, tell: Callable[[], None]) -> None:
        """Tell the watcher, or remember to do so when it is certain that it happened."""
        if self._untold is None:
            tell()
        else:
            self._untold.append(tell)

    # --- memory

    def _access(self, op: Op, operands: list[RuntimeValue], active: Active) -> list[RuntimeValue]:
        kind = ACCESSES[op.name]
        self.operations += 1
        given = dict(zip([value.id for value in op.operands], operands, strict=True))
        mask = mask_of(op)
        masks = [] if mask is None else list(terms_of(given[mask.id]))
        place = operands[0]
        tile = tile_of(op)
        if isinstance(place, BlockPointer):
            starts = [_dense(given[value.id]) for value in places_of(op)[1:]]
            offsets, block_masks, tile = _block_terms(op, place, starts, tile)
            place, masks = place.base, [*masks, *block_masks]
        else:
            offsets = list(terms_of(place.offset))
        width = size_of(accessed(op))
        if place.buffer is not None:
            reached = [place.buffer]
            self._reach(kind, place.buffer, offsets, masks, tile, active, width)
        else:
            written_out = Pointer(None, _total(offsets, torch.add))
            every = _total(masks, torch.logical_and) if masks else None
            reached = []
            for target in targets(self, op, written_out, every, active):
                reached.append(target.buffer)
                inside = [] if target.mask is None else [target.mask]
                self._reach(kind, target.buffer, [target.offset], inside, tile, active, width)
        if any(result.id in self.slice.needed for result in op.results):
            return self._data(op, kind, operands, reached, active)
        return [ABSENT] * len(op.results)

    def _reach(
        self,
        kind: Access,
        buffer: Buffer,
        offsets: list[Tensor],
        masks: list[Tensor],
        tile: tuple[int, ...],
        active: Active,
        width: int,
    ) -> None:
        """Touch elements of `width` bytes: several of the buffer's where it holds narrower ones."""
        if kind is not Access.READ:
            self.unknown.add(id(buffer))
        rank = max([len(tile), *(term.dim() - 1 for term in (*offsets, *masks))])
        tile = (1,) * (rank - len(tile)) + tile
        part = min(width, buffer.itemsize)
        for step in range(max(1, width // buffer.itemsize)):
            there = offsets if step == 0 else [offsets[0] + step, *offsets[1:]]
            self._tell(
                lambda there=there: self.watcher.reach(kind, buffer, there, masks, tile, active.size, part)  # type: ignore[misc]
            )

    def _data(
        self, op: Op, kind: Access, operands: list[RuntimeValue], reached: list[Buffer], active: Active
    ) -> list[RuntimeValue]:
        """The values an address depends on."""
        if kind is not Access.READ:
            raise self._needs(op, "what an atomic operation finds decides where programs go")
        for buffer in reached:
            if id(buffer) in self.unknown or buffer.root.is_meta:
                raise self._needs(op, f"contents of {buffer.name} decide where programs go")
        values = [value if isinstance(value, Absent) else _dense(value) for value in operands]
        return list(super().compute(op, values, active))

    def _needs(self, op: Op, message: str) -> NeedsValues:
        return self.error(NeedsValues, op, message, remedy="Execute the launch instead.")


def _is_pointer(kind: Kind) -> bool:
    return kind in (Kind.POINTER, Kind.DESCRIPTOR)


def _dense(value: RuntimeValue) -> RuntimeValue:
    """A value without lazy tiles. What is absent must not be asked for."""
    if isinstance(value, Absent):
        raise RuntimeError("a value outside the slice is needed")
    return value.map(dense) if isinstance(value, Pointer) else dense(value)


def _total(terms: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = combine(total, term)
    return total


def _block_terms(
    op: Op, block: BlockPointer, starts: list[Tensor], tile: tuple[int, ...]
) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
    """Offsets, masks and shape of the lanes of a block pointer or descriptor, one term per dimension.

    `starts` are the operands that say where a descriptor is used: one (P,) per dimension, or (P, n) rows and a column.
    """
    if op.name.startswith("tt.descriptor"):
        shape = (1,) * (len(block.extents) - len(tile)) + tile
        checked = set(range(len(shape)))
    else:
        starts, shape = block.offsets, tile
        checked = set(op.attributes.get("boundaryCheck", ()))
    rank = len(shape)
    scale = 1 if block.base.buffer is not None else size_of(accessed(op))
    offsets, masks = [block.base.offset.reshape(-1, *[1] * rank)], []
    for dim, length in enumerate(shape):
        along = [1] * (rank + 1)
        along[dim + 1] = length
        start = starts[dim].to(torch.int64)
        if start.dim() > 1:
            place = start.view(-1, start.size(1), *[1] * (rank - 1))
        else:
            place = start.reshape(-1, *[1] * rank) + torch.arange(length).view(along)
        offsets.append(place * (block.strides[dim].reshape(-1, *[1] * rank) * scale))
        if dim in checked:
            inside = (place >= 0) & (place < block.extents[dim].reshape(-1, *[1] * rank))
            masks.append(torch.ones((1,) * (rank + 1), dtype=torch.bool) if bool(inside.all()) else inside)
    return offsets, masks, shape
