"""Races between programs that nothing puts in order: every launch without atomics whose old value is used.

Such programs run side by side, so that the shadow of a buffer says for each element who wrote, updated and read it.
Several programs may store one value to one element; whoever else reads it, or stores another value, races.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.sanitizer.lanes import MANY, NOBODY, Lanes

ALL = -3
"""Owner of an element that every program of the launch wrote in one store."""
_PENDING_LIMIT = 1 << 22
"""Elements of unprocessed reads kept before they are folded into the map of readers."""

READS_FOREIGN = "reads what another program writes in the same launch"
OVERWRITES = "overwrites what another program reads or writes in the same launch"
STORES_OVER_ATOMIC = "stores plainly what another program updates atomically"
UPDATES_OVER_PLAIN = "updates atomically what another program reads or stores plainly"
WRITES_TWICE = "is stored with different values by several programs"
UPDATES_SHARED = "adds to"
STORES_AFTER_OTHERS = "takes turns to add to"


@dataclass(frozen=True)
class Clash:
    """Lanes of an access that race."""

    what: str
    """What the access does wrong, in words that follow the name of the access."""
    lanes: Tensor
    """Which of the lanes, shape (n,), bool."""
    races: bool = True
    """False: the access is safe, and comes in no fixed order with those of other programs."""


@dataclass(frozen=True)
class Order:
    """What an atomic update does to the order of programs."""

    acquires: bool
    """What was released at the element happens before what follows; only where the program looks at the old value."""
    releases: bool
    """What the program did so far happens before what an acquirer of the element does."""


class Races(Protocol):
    """Judges accesses; each method returns the ways in which lanes race."""

    def read(self, buffer: Buffer, lanes: Lanes) -> list[Clash]:
        """Judge a load."""

    def store(self, buffer: Buffer, lanes: Lanes, same: Callable[[], Tensor], owner: Tensor | None) -> list[Clash]:
        """Judge a store."""

    def update(self, buffer: Buffer, lanes: Lanes, order: Order) -> list[Clash]:
        """Judge an atomic update."""


@dataclass(eq=False)
class Shadow:
    """Who touched each element of one buffer in this launch: a program id, nobody, many, or all."""

    writer: Tensor
    atomic: Tensor
    reader: Tensor
    programs: int
    """Programs of the launch."""
    pending: list[Lanes] = field(default_factory=list)
    """Reads not yet in `reader`: most buffers are never written, and then nobody asks."""
    pending_size: int = 0
    touched: bool = False
    """Whether anything was written or atomically updated."""
    known_readers: bool = False
    """Whether anything was read."""
    fresh: list[Lanes] = field(default_factory=list)
    """Stores not yet in `writer`: no two lanes met in the elements between `low` and `high`."""
    fresh_size: int = 0
    low: int = 0
    high: int = -1
    updated: bool = False
    """Whether anything was atomically updated."""
    coauthors: list[Tensor] = field(default_factory=list)
    """element * programs + program for everyone who wrote an element that many wrote."""

    @classmethod
    def of(cls, buffer: Buffer, programs: int) -> Shadow:
        """A shadow of an untouched buffer."""
        nobody = buffer.root.new_full((buffer.size,), NOBODY, dtype=torch.int32)
        return cls(nobody, nobody.clone(), nobody.clone(), programs)

    def settle(self) -> None:
        """Fold pending accesses into the maps."""
        for lanes in self.pending:
            claim(self.reader, lanes)
        self.pending.clear()
        self.pending_size = 0
        for lanes in self.fresh:
            self.writer.scatter_(0, lanes.index, lanes.program)
        self.fresh.clear()
        self.fresh_size = 0

    def meets_nobody(self, lanes: Lanes, owner: Tensor | None) -> bool:
        """Whether a store is known to meet no other access, without looking at its elements; then it is noted."""
        if owner is not None or self.known_readers or self.updated or self.coauthors:
            return False
        if lanes.shape[0] == 1 and lanes.active.size > 1:  # every program stores
            return False
        if lanes.index.numel():
            low, high = (int(end) for end in lanes.index.aminmax())
            if low <= self.high and high >= self.low:
                return False
            self.low, self.high = (min(low, self.low), max(high, self.high)) if self.high >= 0 else (low, high)
            self.touched = True
            self.fresh.append(lanes)
            self.fresh_size += lanes.index.numel()
            if self.fresh_size > _PENDING_LIMIT:
                self.settle()
        return True

    def wrote(self, lanes: Lanes, *, alone: bool) -> None:
        """Note a store; `alone` says that no lane meets another lane or an earlier writer."""
        self.touched = True
        index, program = lanes.index, lanes.program
        if index.numel():
            low, high = (int(end) for end in index.aminmax())
            self.low, self.high = (min(low, self.low), max(high, self.high)) if self.high >= 0 else (low, high)
        if lanes.shape[0] == 1 and lanes.active.size == self.programs > 1:
            self.writer[index] = ALL
            return
        if alone and not (lanes.shape[0] == 1 and lanes.active.size > 1):
            self.writer.scatter_(0, index, program)
            return
        before = self.writer.index_select(0, index)
        single = before >= 0
        self.coauthors.append(index[single] * self.programs + before[single])
        self.coauthors.append(self._keys(index, program, lanes))
        claim(self.writer, lanes)
        self.writer[index[before == ALL]] = ALL

    def foreign(self, lanes: Lanes) -> Tensor:
        """Which lanes (n,) see an element that a program wrote which is not their own."""
        index, program = lanes.index, lanes.program
        writer = self.writer.index_select(0, index)
        found = (writer >= 0) & (writer != program)
        many = writer == MANY
        if bool(many.any()):
            known = torch.cat(self.coauthors).unique()
            found[many] = ~self._authors(index[many], program[many], lanes, known)
        return found

    def _authors(self, index: Tensor, program: Tensor, lanes: Lanes, known: Tensor) -> Tensor:
        """Which elements the program of their lane, or each of its programs, is among the writers of."""
        keys = self._keys(index, program, lanes).view(-1, index.numel())
        return torch.isin(keys, known).all(0)

    def _keys(self, index: Tensor, program: Tensor, lanes: Lanes) -> Tensor:
        """element * programs + program, for every active program where an access belongs to many."""
        if lanes.shape[0] == 1 and lanes.active.size > 1:
            return (index.view(1, -1) * self.programs + lanes.active.ids.view(-1, 1)).reshape(-1)
        return index * self.programs + program


class SideBySide:
    """Judges accesses of programs without any order."""

    def __init__(self, programs: int, written: set[int] | None = None) -> None:
        self.programs = programs
        self._written = written
        """Ids of buffers that the launch may write; None: any."""
        self._shadows: dict[int, Shadow] = {}

    def _shadow(self, buffer: Buffer) -> Shadow:
        shadow = self._shadows.get(id(buffer))
        if shadow is None:
            shadow = self._shadows[id(buffer)] = Shadow.of(buffer, self.programs)
        return shadow

    def read(self, buffer: Buffer, lanes: Lanes) -> list[Clash]:
        """Judge a load."""
        if self._written is not None and id(buffer) not in self._written:
            return []
        shadow = self._shadow(buffer)
        shadow.known_readers = True
        shadow.pending.append(lanes)
        shadow.pending_size += math.prod(lanes.shape)
        if shadow.touched or shadow.pending_size > _PENDING_LIMIT:
            shadow.settle()
        if not shadow.touched:
            return []
        bad = shadow.foreign(lanes) | others(shadow.atomic.index_select(0, lanes.index), lanes.program)
        return [Clash(READS_FOREIGN, bad)]

    def store(self, buffer: Buffer, lanes: Lanes, same: Callable[[], Tensor], owner: Tensor | None) -> list[Clash]:
        """Judge a store; `same` tells which lanes store what is there, `owner` is `Tape.owners`."""
        shadow = self._shadow(buffer)
        if shadow.meets_nobody(lanes, owner):
            return []
        shadow.settle()
        index, program = lanes.index, lanes.program
        writer = shadow.writer.index_select(0, index)
        rewrites = (writer != NOBODY) & (writer != program)
        alone = owner is None and not bool(rewrites.any())
        bad = others(shadow.reader.index_select(0, index), program)
        found = [
            Clash(OVERWRITES, bad if alone else bad | (rewrites & ~same())),
            Clash(STORES_OVER_ATOMIC, others(shadow.atomic.index_select(0, index), program)),
        ]
        shadow.wrote(lanes, alone=alone)
        return found

    def update(self, buffer: Buffer, lanes: Lanes, _: Order) -> list[Clash]:
        """Judge an atomic update; nobody reads its result, so it puts nothing in order."""
        shadow = self._shadow(buffer)
        shadow.settle()
        index, program = lanes.index, lanes.program
        bad = others(shadow.writer.index_select(0, index), program) | others(
            shadow.reader.index_select(0, index), program
        )
        claim(shadow.atomic, lanes)
        shadow.touched = shadow.updated = True
        found = [Clash(UPDATES_OVER_PLAIN, bad)]
        if buffer.is_float:
            found.append(Clash(UPDATES_SHARED, shadow.atomic.index_select(0, index) == MANY, races=False))
        return found


def claim(owners: Tensor, lanes: Lanes) -> None:
    """Note the programs of an access; an element that several programs touch belongs to many."""
    index, program = lanes.index, lanes.program
    known = owners.index_select(0, index)
    owners.scatter_(0, index, torch.where((known == NOBODY) | (known == program), program, MANY))
    clash = owners.index_select(0, index) != program
    owners[index[clash]] = MANY


def others(owners: Tensor, program: Tensor) -> Tensor:
    """Which elements belong to another program than that of the lane; many are always others, of many too."""
    return (owners < NOBODY) | ((owners != NOBODY) & (owners != program))
