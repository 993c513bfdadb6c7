"""Watches a launch on a GPU without ever waiting for it: one flag on the device says whether anything may be wrong.

Every access keeps all its lanes; those that do not take part read any element and write beside the buffer (see
`Tape.padded`). The sentry suspects at least what the sanitizer would report, and says neither what nor where: a launch
under suspicion is run again with the sanitizer, from the same contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Op
from kernel_agent.ir.sanitizer.lanes import Lanes
from kernel_agent.ir.sanitizer.sanitizer import WITHIN_PROGRAM, same
from kernel_agent.ir.sanitizer.views import View
from kernel_agent.ir.values import Active

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_NOBODY, _EVERYBODY = 2**31 - 1, -1
"""Lowest and highest program of an element that nobody touched."""


@dataclass(eq=False)
class EveryLane(Lanes):
    """All lanes of an access, whether they take part or not."""

    size: int = 0
    """Elements of the buffer; what is beside it takes the other lanes."""

    def broadcast(self, *values: Tensor) -> EveryLane:
        """The same access with a lane for every element of the values stored."""
        wide = super().broadcast(*values)
        return EveryLane(wide.offset, wide.valid, wide.active, wide.view, self.size)

    def select(self, value: Tensor) -> Tensor:
        """The value at every lane, shape (n,)."""
        return value.expand(self.shape).reshape(-1)

    def spread(self, values: Tensor) -> Tensor:
        """The inverse of `select`."""
        return values.view(self.shape)

    def readable(self) -> Tensor:
        """Elements to gather, inside of the buffer for every lane."""
        return self.offset.clamp(0, max(0, self.size - 1))

    @cached_property
    def index(self) -> Tensor:
        """Elements touched, `size` for lanes that do not take part; shape (n,), int64."""
        inside = self.offset.clamp(0, self.size)
        return self.select(inside if self.valid is None else torch.where(self.valid, inside, self.size))


@dataclass(eq=False)
class Span:
    """Lowest and highest program that touched each element of a buffer, shape (size + 1,), int32."""

    lowest: Tensor
    highest: Tensor

    @classmethod
    def of(cls, buffer: Buffer) -> Span:
        """Nobody came yet."""
        shape = (buffer.size + 1,)
        lowest = torch.full(shape, _NOBODY, dtype=torch.int32, device=buffer.root.device)
        return cls(lowest, torch.full_like(lowest, _EVERYBODY))

    def add(self, lanes: Lanes) -> None:
        """Note an access."""
        ids = lanes.active.ids.to(torch.int32)
        if lanes.shape[0] != lanes.active.size:  # the same for all programs
            low, high = ids.amin().expand_as(lanes.index), ids.amax().expand_as(lanes.index)
        else:
            low = high = lanes.select(ids.view(-1, *[1] * (len(lanes.shape) - 1)))
        self.lowest.scatter_reduce_(0, lanes.index, low, "amin")
        self.highest.scatter_reduce_(0, lanes.index, high, "amax")

    def touched(self) -> Tensor:
        """Which elements anybody touched."""
        return self.lowest != _NOBODY

    def several(self) -> Tensor:
        """Which elements several programs touched."""
        return self.touched() & (self.lowest != self.highest)

    def differs(self, other: Span) -> Tensor:
        """Which elements both touched, and not one program alone."""
        alike = (self.lowest == other.lowest) & (self.highest == other.highest) & (self.lowest == self.highest)
        return self.touched() & other.touched() & ~alike


@dataclass(eq=False)
class Visits:
    """Who came to one buffer that the launch may write."""

    writers: Span | None = None
    readers: Span | None = None
    updaters: Span | None = None

    def suspicious(self) -> Tensor | None:
        """Whether programs may have met at an element, one of them writing; None where that is out of the question."""
        found: list[Tensor] = []
        if self.writers is not None:
            found.append(self.writers.several()[:-1].any())
            others = (self.readers, self.updaters)
            found += [self.writers.differs(other)[:-1].any() for other in others if other is not None]
        if self.updaters is not None and self.readers is not None:
            found.append(self.updaters.differs(self.readers)[:-1].any())
        return torch.stack(found).any() if found else None


class Sentry:
    """Suspects accesses of one launch; stands in for a `Sanitizer`."""

    def __init__(self, device: torch.device, written: set[int] | None, *, watch: bool) -> None:
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        self._written = written
        """Ids of buffers that the launch may write; None: any."""
        self._watch = watch
        """Whether unwritten reads and races are suspected; bounds always are."""
        self.machine: Machine | None = None
        self._visits: dict[int, Visits] = {}
        self._marks: dict[int, tuple[Buffer, Tensor]] = {}
        """Buffers with unwritten elements, and which elements are written by now, shape (size + 1,)."""

    def suspects(self) -> bool:
        """Whether anything may be wrong. The only question to the device, to be asked once at the end."""
        for visits in self._visits.values():
            found = visits.suspicious()
            if found is not None:
                self._flag |= found
        if bool(self._flag):
            return True
        for buffer, marks in self._marks.values():
            if buffer.written is not None:
                buffer.written.copy_(marks[:-1])
        return False

    def in_bounds(
        self,
        buffer: Buffer,
        offset: Tensor,
        mask: Tensor | None,
        _op: Op,
        _active: Active,
        _access: str,
        view: View | None = None,
    ) -> Tensor | None:
        """The mask as it is: a launch with lanes outside of their argument is run again."""
        if offset.numel():
            self._note(~(view or buffer.extents.all(buffer.name)).touchable(offset), mask)
        return mask

    def read(self, buffer: Buffer, lanes: Lanes, _op: Op) -> None:
        """Suspect a load."""
        if not self._watch:
            return
        self._suspect_unwritten(buffer, lanes)
        if self._may_write(buffer):
            visits = self._visited(buffer)
            visits.readers = visits.readers or Span.of(buffer)
            visits.readers.add(lanes)

    def store(
        self, buffer: Buffer, lanes: Lanes, values: Tensor, _contents: Tensor, owner: Tensor | None, _op: Op
    ) -> None:
        """Suspect a store of `values` (n,); `owner` is `Tape.owners`."""
        if not self._watch:
            return
        if owner is not None:
            values = values.detach()
            self._note(~same(values.index_select(0, owner), values), lanes.index < buffer.size)
        visits = self._visited(buffer)
        visits.writers = visits.writers or Span.of(buffer)
        visits.writers.add(lanes)
        self._mark_written(buffer, lanes)

    def update(self, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Suspect an atomic update; one that is atomic within its program only is a read and a store."""
        if not self._watch:
            return
        self._suspect_unwritten(buffer, lanes)
        visits = self._visited(buffer)
        if op.attributes.get("scope") == WITHIN_PROGRAM:
            visits.readers, visits.writers = visits.readers or Span.of(buffer), visits.writers or Span.of(buffer)
            visits.readers.add(lanes)
            visits.writers.add(lanes)
        else:
            visits.updaters = visits.updaters or Span.of(buffer)
            visits.updaters.add(lanes)
        self._mark_written(buffer, lanes)

    def exchanged(self, buffer: Buffer, lanes: Lanes, op: Op, element: int, *, succeeded: bool) -> None:
        """Nothing to suspect: what compares and exchanges runs on the host, under the sanitizer."""

    def wild(self, _op: Op, _address: int, _active: Active) -> None:
        """Suspect a pointer into no buffer."""
        self._flag.fill_(True)

    def assertion(self, _op: Op, _text: str, failed: Tensor, _active: Active) -> None:
        """Suspect an assertion; `failed` says which lanes."""
        self._note(failed, None)

    def promise(self, _op: Op, _text: str, broken: Tensor, _active: Active) -> None:
        """Suspect a promise to the compiler; `broken` says where."""
        self._note(broken, None)

    def _note(self, bad: Tensor, mask: Tensor | None) -> None:
        self._flag |= (bad if mask is None else bad & mask).any()

    def _suspect_unwritten(self, buffer: Buffer, lanes: Lanes) -> None:
        marks = self._marked(buffer)
        if marks is not None and buffer.size:
            self._note(~marks[lanes.readable()], lanes.valid)

    def _mark_written(self, buffer: Buffer, lanes: Lanes) -> None:
        marks = self._marked(buffer)
        if marks is not None:
            marks.index_fill_(0, lanes.index, True)

    def _marked(self, buffer: Buffer) -> Tensor | None:
        if buffer.written is None:
            return None
        if id(buffer) not in self._marks:
            self._marks[id(buffer)] = (buffer, torch.cat([buffer.written, buffer.written.new_ones(1)]))
        return self._marks[id(buffer)][1]

    def _may_write(self, buffer: Buffer) -> bool:
        return self._written is None or id(buffer) in self._written

    def _visited(self, buffer: Buffer) -> Visits:
        return self._visits.setdefault(id(buffer), Visits())
