"""A set of elements of one buffer, as marks where they are scattered and as intervals where they are consecutive."""

from __future__ import annotations

import torch
from torch import Tensor

_PENDING = 1 << 20
"""Intervals that are kept before they are merged."""


class ElementSet:
    """Elements of a buffer, each at most once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._marks: Tensor | None = None
        self._intervals: list[Tensor] = []
        """Pieces of shape (n, 2): first element, and the one after the last."""
        self._pending = 0

    def add(self, elements: Tensor) -> None:
        """Add single elements, shape (n,)."""
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
        if not self._intervals:
            return 0 if self._marks is None else int(self._marks.count_nonzero())
        self._intervals, self._pending = [merged(self._intervals)], 0
        lengths = self._intervals[0][:, 1] - self._intervals[0][:, 0]
        if self._marks is None:
            return int(lengths.sum())
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self._marks.cumsum(0)])
        already = before[self._intervals[0][:, 1]] - before[self._intervals[0][:, 0]]
        return int(before[-1] + (lengths - already).sum())


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
