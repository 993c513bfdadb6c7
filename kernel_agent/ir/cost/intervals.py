"""A set of elements of one buffer, as marks where they are scattered and as intervals where they are consecutive."""

from __future__ import annotations

import torch
from torch import Tensor

_PENDING = 1 << 20
"""Intervals that are kept before they are merged, and single elements that are kept as intervals."""
_LONG = 512
"""Elements from which on an interval is marked by itself."""
_WRITTEN = 1 << 14
"""Shorter intervals that are written out at once."""


class ElementSet:
    """Elements of a buffer, each at most once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._marks: Tensor | None = None
        self._intervals: list[Tensor] = []
        """Pieces of shape (n, 2): first element, and the one after the last."""
        self._pending = 0
        self._single = 0

    def add(self, elements: Tensor) -> None:
        """Add single elements, shape (n,)."""
        self._single += elements.numel()
        if self._marks is None and self._single <= _PENDING:
            self.add_runs(elements, torch.ones_like(elements))
            return
        if self._marks is None:
            self._marks = torch.zeros(self.size, dtype=torch.bool)
        self._marks.index_fill_(0, elements, True)

    def add_runs(self, starts: Tensor, lengths: Tensor) -> None:
        """Add consecutive elements; both (n,), lengths above 0."""
        self._intervals.append(torch.stack([starts, starts + lengths], 1))
        self._pending += starts.numel()
        if self._pending > _PENDING:
            self._intervals = [merged(self._intervals)]
            self._pending = 0

    def __or__(self, other: ElementSet) -> ElementSet:
        both = ElementSet(self.size)
        both._intervals = [*self._intervals, *other._intervals]
        if self._marks is not None and other._marks is not None:
            both._marks = self._marks | other._marks
        elif self._marks is not None or other._marks is not None:
            both._marks = (self._marks if other._marks is None else other._marks).clone()  # type: ignore[union-attr]
        return both

    def __len__(self) -> int:
        self._intervals, self._pending = [merged(self._intervals)] if self._intervals else [], 0
        if self._marks is None:
            return sum(int((piece[:, 1] - piece[:, 0]).sum()) for piece in self._intervals)
        for piece in self._intervals:
            _paint(self._marks, piece)
        self._intervals = []
        return int(self._marks.count_nonzero())


def _paint(marks: Tensor, intervals: Tensor) -> None:
    """Mark intervals (n, 2) that do not touch: long ones one by one, short ones written out."""
    lengths = intervals[:, 1] - intervals[:, 0]
    long = lengths >= _LONG
    for start, stop in intervals[long].tolist():
        marks[start:stop] = True
    for starts, counts in zip(intervals[~long][:, 0].split(_WRITTEN), lengths[~long].split(_WRITTEN), strict=True):
        inside = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        marks.index_fill_(0, torch.repeat_interleave(starts, counts) + inside, True)


def merged(pieces: list[Tensor]) -> Tensor:
    """Intervals that do not touch, shape (n, 2), ascending, of the same elements."""
    intervals = torch.cat(pieces)
    start, order = intervals[:, 0].sort()
    reach = intervals[:, 1][order].cummax(0).values
    opens = torch.ones_like(start, dtype=torch.bool)
    opens[1:] = start[1:] > reach[:-1]
    closes = torch.ones_like(opens)
    closes[:-1] = opens[1:]
    return torch.stack([start[opens], reach[closes]], 1)
