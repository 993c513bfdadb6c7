"""Races between programs that order themselves by atomics: locks, counters, tickets.

Such programs are executed one after the other, but on a device only atomics put them in order: what a program did
before it released an element (`atomic_add`, `atomic_xchg`, `atomic_cas` with `sem` release or acq_rel, the default)
happens before what another does after it acquired that element and looked at the value it found. Everything else is
unordered, whatever order it was executed in. Every program has a vector clock, every element the epochs (program,
clock) of its last writer, reader and updater (FastTrack, Flanagan and Freund 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.sanitizer.lanes import MANY, NOBODY, Lanes
from kernel_agent.ir.sanitizer.races import (
    OVERWRITES,
    READS_FOREIGN,
    STORES_AFTER_OTHERS,
    STORES_OVER_ATOMIC,
    UPDATES_OVER_PLAIN,
    UPDATES_SHARED,
    Clash,
    Order,
    claim,
)

_SINGLE_ELEMENTS = 64
"""Wider atomics release and acquire their whole buffer at once: cheaper, and never a false race."""
_LOG_LIMIT = 1 << 24
"""Elements of remembered accesses per buffer; beyond that, accesses of many programs count as ordered."""


@dataclass(eq=False)
class Epochs:
    """The last access of one kind to each element of a buffer."""

    program: Tensor
    """Program id, nobody, or many that are not ordered; shape (size,), int32."""
    clock: Tensor
    """Clock of that program then, shape (size,), int32."""
    log: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """(program, clock, elements) of every access, for elements of many."""
    logged: int = 0

    @classmethod
    def of(cls, buffer: Buffer) -> Epochs:
        """Nobody came yet."""
        empty = buffer.root.new_full((buffer.size,), NOBODY, dtype=torch.int32)
        return cls(empty, torch.zeros_like(empty))


@dataclass(eq=False)
class Past:
    """What happens before the present of one program."""

    program: int
    clock: int
    known: Tensor
    """Clock of each program up to which its accesses happen before now, shape (programs,), int32."""

    def holds(self, program: Tensor, clock: Tensor) -> Tensor:
        """Which epochs (n,) of single programs lie in the past or are our own."""
        return (program == self.program) | (clock <= self.known[program.clamp(min=0)])

    def release(self) -> Tensor:
        """What an acquirer learns: all we know and all we did; what follows is a new epoch."""
        told = self.known.clone()
        told[self.program] = self.clock
        self.clock += 1
        return told

    def learn(self, told: Tensor) -> None:
        """Acquire."""
        self.known = torch.maximum(self.known, told)


@dataclass(eq=False)
class History:
    """All epochs of one buffer."""

    writer: Epochs
    reader: Epochs
    updater: Epochs
    updaters: Tensor
    """Who updated each element, ordered or not: a program, nobody, or many; shape (size,), int32."""

    @classmethod
    def of(cls, buffer: Buffer) -> History:
        """An untouched buffer."""
        updater = Epochs.of(buffer)
        return cls(Epochs.of(buffer), Epochs.of(buffer), updater, updater.program.clone())


class OneByOne:
    """Judges accesses of programs that run one at a time."""

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self._pasts: dict[int, Past] = {}
        self._histories: dict[int, History] = {}
        self._released: dict[tuple[int, int], Tensor] = {}
        """(buffer, element, or -1 for the whole buffer) -> what its acquirer learns."""

    def read(self, buffer: Buffer, lanes: Lanes) -> list[Clash]:
        """Judge a load."""
        history, past = self._history(buffer), self._past(lanes)
        index = lanes.index
        bad = self._unordered(history.writer, index, past) | self._unordered(history.updater, index, past)
        self._note(history.reader, index, past)
        return [Clash(READS_FOREIGN, bad)]

    def store(self, buffer: Buffer, lanes: Lanes, same: Callable[[], Tensor], _: Tensor | None) -> list[Clash]:
        """Judge a store; several programs may store one value."""
        history, past = self._history(buffer), self._past(lanes)
        index = lanes.index
        rewrites = self._unordered(history.writer, index, past)
        if bool(rewrites.any()):
            rewrites = rewrites & ~same()
        read = self._unordered(history.reader, index, past)
        updated = self._unordered(history.updater, index, past)
        found = [Clash(OVERWRITES, rewrites | read), Clash(STORES_OVER_ATOMIC, updated)]
        if buffer.is_float:
            found.append(Clash(STORES_AFTER_OTHERS, _in_turn(history, index, past), races=False))
        history.writer.program[index] = past.program
        history.writer.clock[index] = past.clock
        for epochs, racing in ((history.reader, read), (history.updater, updated)):
            epochs.program[index[~racing]] = NOBODY  # whoever comes after this store comes after those
        self._forget(buffer, index)
        return found

    def update(self, buffer: Buffer, lanes: Lanes, order: Order) -> list[Clash]:
        """Judge an atomic update, and follow the order it makes."""
        history, past = self._history(buffer), self._past(lanes)
        index = lanes.index
        places = [(id(buffer), element) for element in self._elements(index)]
        if order.acquires:
            for place in (*places, (id(buffer), -1)):
                if place in self._released:
                    past.learn(self._released[place])
        bad = self._unordered(history.writer, index, past) | self._unordered(history.reader, index, past)
        self._note(history.updater, index, past)
        if order.releases:
            told = past.release()
            for place in places:
                before = self._released.get(place)
                self._released[place] = told if before is None else torch.maximum(before, told)
        claim(history.updaters, lanes)
        found = [Clash(UPDATES_OVER_PLAIN, bad)]
        if buffer.is_float:
            found.append(Clash(UPDATES_SHARED, history.updaters.index_select(0, index) == MANY, races=False))
        return found

    # --- state

    def _past(self, lanes: Lanes) -> Past:
        program = int(lanes.active.ids[0])
        if program not in self._pasts:
            known = lanes.active.ids.new_zeros(self.programs, dtype=torch.int32)
            self._pasts[program] = Past(program, 1, known)
        return self._pasts[program]

    def _history(self, buffer: Buffer) -> History:
        if id(buffer) not in self._histories:
            self._histories[id(buffer)] = History.of(buffer)
        return self._histories[id(buffer)]

    @staticmethod
    def _elements(index: Tensor) -> list[int]:
        return [int(element) for element in index] if index.numel() <= _SINGLE_ELEMENTS else [-1]

    def _forget(self, buffer: Buffer, index: Tensor) -> None:
        """A plain store ends what was released at an element."""
        if not any(key == id(buffer) for key, _ in self._released):
            return
        stored = set(index.tolist())
        for place in [place for place in self._released if place[0] == id(buffer) and place[1] in stored]:
            del self._released[place]

    def _note(self, epochs: Epochs, index: Tensor, past: Past) -> None:
        """Record an access; an earlier one that is not ordered before it makes the element one of many."""
        program, clock = epochs.program[index], epochs.clock[index]
        single = (program == NOBODY) | ((program >= 0) & past.holds(program, clock))
        epochs.program[index] = torch.where(single, past.program, MANY).to(torch.int32)
        epochs.clock[index] = past.clock
        if epochs.logged < _LOG_LIMIT:
            epochs.log.append((past.program, past.clock, index))
            epochs.logged += index.numel()

    def _unordered(self, epochs: Epochs, index: Tensor, past: Past) -> Tensor:
        """Which elements were accessed by a program that nothing puts before us, shape (n,)."""
        program = epochs.program[index]
        found = (program >= 0) & ~past.holds(program, epochs.clock[index])
        many = program == MANY
        if bool(many.any()):
            for elements in _later(epochs, past):
                found |= many & torch.isin(index, elements)
        return found


def _in_turn(history: History, index: Tensor, past: Past) -> Tensor:
    """Which elements (n,) we read and now store after another program stored them: a lock says that programs take
    turns, and not in which order."""
    writer, reader = history.writer.program[index], history.reader.program[index]
    return (writer >= 0) & (writer != past.program) & ((reader == past.program) | (reader == MANY))


def _later(epochs: Epochs, past: Past) -> Iterator[Tensor]:
    """Elements of logged accesses of other programs that do not happen before now."""
    for program, clock, elements in epochs.log:
        if program != past.program and clock > int(past.known[program]):
            yield elements
