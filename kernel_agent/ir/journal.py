"""What the segments of a long loop changed in memory, so that it can be brought back to the start of any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.ir.memory import Tape


@dataclass(eq=False)
class Change:
    """What one segment changed in one buffer."""

    index: Tensor
    """Elements, shape (n,), each once."""
    values: Tensor
    """What they held on the other side of the segment, shape (n,)."""

    def swap(self, contents: Tensor) -> None:
        """Step over the segment, in either direction."""
        held = contents.index_select(0, self.index)
        contents.index_copy_(0, self.index, self.values)
        self.values = held


class Journal:
    """Memory during one loop that runs in segments. Writes are noted while the loop runs; replays come later."""

    def __init__(self, tapes: list[Tape]) -> None:
        self._tapes = tapes
        self._states: dict[int, Tensor] = {}
        self._changes: list[dict[int, Change]] = []
        self._position = 0
        for tape in tapes:
            tape.log = []

    @property
    def segments(self) -> int:
        """How many segments have ended."""
        return len(self._changes)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        kept = [
            part for changes in self._changes for change in changes.values() for part in (change.index, change.values)
        ]
        return sum(int(tensor.nbytes) for tensor in (*kept, *self._states.values()))

    def end_segment(self) -> None:
        """Note what changed since the segment before."""
        self._changes.append({id(tape.buffer): _condensed(tape) for tape in self._tapes if tape.log})

    def end_loop(self) -> None:
        """Keep memory as it is now; what writes to it later is not noted."""
        changed = set().union(*self._changes) if self._changes else set()
        for tape in self._tapes:
            tape.log = None
            key = id(tape.buffer)
            self._states[key] = tape.contents.clone() if key in changed else tape.snapshot()
        self._tapes = []
        self._position = self.segments

    @contextlib.contextmanager
    def at(self, segment: int) -> Iterator[dict[int, Tensor]]:
        """Contents of every buffer, by its id, at the start of a segment. The segment may run on them in the block."""
        while self._position > segment:
            self._position -= 1
            self._step(self._position)
        while self._position < segment:
            self._step(self._position)
            self._position += 1
        changes = self._changes[segment]
        before = {key: self._states[key].index_select(0, change.index) for key, change in changes.items()}
        try:
            yield self._states
        finally:
            for key, values in before.items():
                self._states[key].index_copy_(0, changes[key].index, values)

    def _step(self, segment: int) -> None:
        for key, change in self._changes[segment].items():
            change.swap(self._states[key])


def _condensed(tape: Tape) -> Change:
    """Empty the log of a tape into one change; of several writes to one element the first knows the old value."""
    log, tape.log = tape.log or [], []
    index, values = torch.cat([place for place, _ in log]), torch.cat([value for _, value in log])
    once, where = index.unique(return_inverse=True)
    order = torch.arange(index.numel(), device=index.device)
    first = torch.full_like(once, index.numel()).scatter_reduce_(0, where, order, "amin")
    return Change(once, values.index_select(0, first))
