"""Watches every access of one launch: bounds, reads of unwritten memory, races between programs.

Programs of a launch run in no order. Two programs may therefore not touch one element when one of them writes it
plainly, unless all of them write the same value. Kernels that run program by program (locks, counters whose old value
is used) order their programs themselves; for those, races are not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kernel_agent.ir.findings import Finding, FindingKind, Findings
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.values import Active

_NOBODY, _MANY = -1, -2
_PENDING_LIMIT = 1 << 22
"""Elements of unprocessed reads kept before they are folded into the map of readers."""


@dataclass(eq=False)
class Lanes:
    """The lanes of one access that touch memory."""

    offset: Tensor
    """Elements, `[P or 1, *tile]`, tile dimensions lazily broadcast."""
    valid: Tensor | None
    """Which lanes take part; None for all."""
    active: Active

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Common shape of offsets and mask."""
        if self.valid is None:
            return tuple(self.offset.shape)
        return tuple(torch.broadcast_shapes(self.offset.shape, self.valid.shape))

    def broadcast(self, *values: Tensor) -> Lanes:
        """The same access with a lane for every element of the values stored."""
        shape = torch.broadcast_shapes(self.shape, *[value.shape for value in values])
        return Lanes(self.offset.expand(shape), None if self.valid is None else self.valid.expand(shape), self.active)

    def select(self, value: Tensor) -> Tensor:
        """Elements of a value at these lanes, shape (n,)."""
        value = value.expand(self.shape)
        return value.reshape(-1) if self.valid is None else value.masked_select(self.valid)

    def spread(self, values: Tensor) -> Tensor:
        """The inverse of `select`; zero where no lane takes part."""
        if self.valid is None:
            return values.view(self.shape)
        return values.new_zeros(self.shape).masked_scatter(self.valid.expand(self.shape), values)

    @cached_property
    def index(self) -> Tensor:
        """Elements touched, shape (n,), int64."""
        return self.select(self.offset)

    @cached_property
    def program(self) -> Tensor:
        """Program of each lane, shape (n,), int32; an access that does not vary over programs belongs to many."""
        rows = self.shape[0]
        ids = self.active.ids.to(torch.int32)
        if rows != self.active.size:
            ids = ids.new_full((1,), _MANY)
        return self.select(ids.view(rows, *[1] * (len(self.shape) - 1)))


@dataclass(eq=False)
class Shadow:
    """Who touched each element of one buffer in this launch: a program id, nobody, or many."""

    writer: Tensor
    atomic: Tensor
    reader: Tensor
    pending: list[Lanes] = field(default_factory=list)
    """Reads not yet in `reader`: most buffers are never written, and then nobody asks."""
    pending_size: int = 0
    touched: bool = False
    """Whether anything was written or atomically updated."""

    @classmethod
    def of(cls, buffer: Buffer) -> Shadow:
        """A shadow of an untouched buffer."""
        return cls(*(buffer.root.new_full((buffer.size,), _NOBODY, dtype=torch.int32) for _ in range(3)))

    def settle(self) -> None:
        """Fold pending reads into the map of readers."""
        for lanes in self.pending:
            _claim(self.reader, lanes)
        self.pending.clear()
        self.pending_size = 0


class Sanitizer:
    """Judges the accesses of one launch and writes findings."""

    def __init__(
        self, module: Module, grid: tuple[int, int, int], findings: Findings, *, watch: bool, races: bool
    ) -> None:
        self.module = module
        self.grid = grid
        self.findings = findings
        self.watch = watch
        """Whether unwritten reads and races are judged; bounds always are."""
        self.races = races
        self.shadows: dict[int, Shadow] = {}

    # --- bounds

    def in_bounds(
        self, buffer: Buffer, offset: Tensor, mask: Tensor | None, op: Op, active: Active, access: str
    ) -> Tensor | None:
        """Which lanes may touch memory: the mask without lanes outside the buffer; None when all may."""
        if offset.numel() == 0:
            return mask
        low, high = offset.aminmax()
        if int(low) >= 0 and int(high) < buffer.size:
            return mask
        inside = (offset >= 0) & (offset < buffer.size)
        outside = ~inside if mask is None else ~inside & mask
        if bool(outside.any()):
            shape = torch.broadcast_shapes(outside.shape, offset.shape)
            flat = outside.expand(shape)
            where = flat.nonzero()[0]
            element = int(offset.expand(shape)[tuple(where.tolist())])
            row = int(where[0]) if shape[0] > 1 else 0
            self._report(
                FindingKind.OUT_OF_BOUNDS,
                f"{access} outside of {buffer.name}: element {element}, but it has {buffer.size}",
                op,
                buffer,
                element,
                int(active.ids[row]),
                int(flat.sum()),
            )
        return inside if mask is None else inside & mask

    def wild(self, op: Op, address: int, active: Active) -> None:
        """A pointer that points into no buffer of this execution."""
        message = f"address {address:#x} belongs to no tensor of this call"
        self._report(FindingKind.WILD_POINTER, message, op, None, None, int(active.ids[0]), 1)

    def assertion(self, op: Op, text: str, failed: Tensor, active: Active) -> None:
        """A device assertion that did not hold."""
        row = int(failed.nonzero()[0][0]) if failed.size(0) > 1 else 0
        message = f"device assertion failed: {text}"
        self._report(FindingKind.ASSERTION, message, op, None, None, int(active.ids[row]), int(failed.sum()))

    # --- accesses

    def read(self, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Judge a load."""
        if not self.watch:
            return
        if buffer.written is not None:
            self._judge(
                FindingKind.UNINITIALIZED_READ,
                "reads memory that nothing wrote",
                ~buffer.written[lanes.index],
                buffer,
                lanes,
                op,
            )
        if not self.races:
            return
        shadow = self._shadow(buffer)
        shadow.pending.append(lanes)
        shadow.pending_size += math.prod(lanes.shape)
        if shadow.touched or shadow.pending_size > _PENDING_LIMIT:
            shadow.settle()
        if shadow.touched:
            writer, atomic = shadow.writer[lanes.index], shadow.atomic[lanes.index]
            # What many wrote plainly was one value in one store, the reader's own too; what many added up was not.
            foreign = (writer >= 0) & (writer != lanes.program)
            for bad in (foreign, _others(atomic, lanes.program)):
                self._judge(
                    FindingKind.RACE, "reads what another program writes in the same launch", bad, buffer, lanes, op
                )

    def store(
        self, buffer: Buffer, lanes: Lanes, values: Tensor, contents: Tensor, owner: Tensor | None, op: Op
    ) -> None:
        """Judge a store of `values` (n,) before it happens: `contents` (size,) is memory, `owner` is `Tape.owners`."""
        if not self.watch:
            return
        if self.races:
            shadow = self._shadow(buffer)
            shadow.settle()
            index, program = lanes.index, lanes.program
            if owner is not None:
                differs = ~_same(values[owner], values)
                self._judge(FindingKind.RACE, "stores different values to one element", differs, buffer, lanes, op)
            writer, reader = shadow.writer[index], shadow.reader[index]
            clash = ((writer != _NOBODY) & (writer != program)) | _others(reader, program)
            if bool(clash.any()):
                clash &= ~_same(contents[index], values)
                what = "overwrites what another program reads or writes in the same launch"
                self._judge(FindingKind.RACE, what, clash, buffer, lanes, op)
            what = "stores plainly what another program updates atomically"
            self._judge(FindingKind.RACE, what, _others(shadow.atomic[index], program), buffer, lanes, op)
            shadow.writer[index] = program
            shadow.touched = True
        if buffer.written is not None:
            buffer.written[lanes.index] = True

    def update(self, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Judge an atomic update."""
        if not self.watch:
            return
        index, program = lanes.index, lanes.program
        if buffer.written is not None:
            what = "updates memory that nothing wrote"
            self._judge(FindingKind.UNINITIALIZED_READ, what, ~buffer.written[index], buffer, lanes, op)
            buffer.written[index] = True
        if self.races:
            shadow = self._shadow(buffer)
            shadow.settle()
            mixed = _others(shadow.writer[index], program) | _others(shadow.reader[index], program)
            what = "updates atomically what another program reads or stores plainly"
            self._judge(FindingKind.RACE, what, mixed, buffer, lanes, op)
            _claim(shadow.atomic, lanes)
            shadow.touched = True

    # --- reporting

    def _shadow(self, buffer: Buffer) -> Shadow:
        shadow = self.shadows.get(id(buffer))
        if shadow is None:
            shadow = self.shadows[id(buffer)] = Shadow.of(buffer)
        return shadow

    def _judge(self, kind: FindingKind, what: str, bad: Tensor, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Report the lanes (n,) that are bad, if any."""
        if not bool(bad.any()):
            return
        first = int(bad.nonzero()[0][0])
        element = int(lanes.index[first])
        message = f"{what}: element {element} of {buffer.name}, which has {buffer.size}"
        self._report(kind, message, op, buffer, element, int(lanes.program[first]), int(bad.sum()))

    def _report(
        self,
        kind: FindingKind,
        message: str,
        op: Op,
        buffer: Buffer | None,
        offset: int | None,
        program: int,
        count: int,
    ) -> None:
        place = self.module.place(op)
        kernel = self.module.entry.name
        x, y, _ = self.grid
        ids = None if program < 0 else (program % x, program // x % y, program // (x * y))
        where = f"{kernel}, line {place.line}: " if place else f"{kernel}: "
        self.findings.add(
            Finding(
                kind,
                where + message + (f", program {ids}" if ids else ""),
                kernel,
                place.file if place else "",
                place.line if place else None,
                buffer.name if buffer else "",
                offset,
                buffer.size if buffer else None,
                ids,
                count,
            )
        )


def _claim(owners: Tensor, lanes: Lanes) -> None:
    """Note the programs of an access; an element that several programs touch belongs to many."""
    index, program = lanes.index, lanes.program
    known = owners[index]
    owners[index] = torch.where((known == _NOBODY) | (known == program), program, _MANY)
    clash = owners[index] != program
    owners[index[clash]] = _MANY


def _others(owners: Tensor, program: Tensor) -> Tensor:
    """Which elements belong to another program than that of the lane; many are always others, of many too."""
    return (owners == _MANY) | ((owners != _NOBODY) & (owners != program))


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Equal up to the last bits: programs that compute one value in one way may differ there when batched."""
    if not a.is_floating_point():
        return a == b
    return ((a - b).abs() <= 1e-12 * b.abs()) | (a == b) | (a.isnan() & b.isnan())
