"""Small sizes for those of a call: what was equal stays equal, what was a multiple stays one where that is asked."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Relation(enum.Enum):
    """What smaller sizes keep of how the call's sizes hang together."""

    DIVIDES = "divides"
    """A multiple of a smaller size stays a multiple; up to four times, the same one."""
    EXACT = "exact"
    """A multiple stays the same multiple."""
    FREE = "free"
    """Nothing but being equal."""
    OWN = "own"
    """The sizes of the call."""


@dataclass(frozen=True)
class Shrinking:
    """One way to make a call small."""

    relation: Relation
    tile: int = 16
    """What a multiple of 16 becomes at least."""


TRIED = (
    Shrinking(Relation.DIVIDES),
    Shrinking(Relation.EXACT),
    Shrinking(Relation.DIVIDES, 64),
    Shrinking(Relation.FREE),
    Shrinking(Relation.DIVIDES, 128),
    Shrinking(Relation.OWN),
)
"""In the order in which they are tried: a stub may refuse sizes for reasons of its own."""

_KEPT = 4
"""Sizes up to this are counts that cost nothing."""
_NEAREST = 4
"""Multiples up to this one stay the same multiple."""


def small_sizes(sizes: Iterable[int], shrinking: Shrinking) -> dict[int, int]:
    """A small size for each distinct one above 1."""
    found: dict[int, int] = {}
    for size in sorted({size for size in sizes if size > 1}):
        if shrinking.relation is Relation.OWN:
            found[size] = size
            continue
        found[size] = _small(size, found, shrinking)
    return found


def _small(size: int, smaller: dict[int, int], shrinking: Shrinking) -> int:
    if size <= _KEPT:
        return size
    if shrinking.relation is not Relation.FREE:
        for other in sorted(smaller, reverse=True):
            if size % other == 0:
                times = size // other
                if shrinking.relation is Relation.DIVIDES and times > _NEAREST:
                    times = 3 if times % 2 else 2
                if times * smaller[other] >= shrinking.tile or size < shrinking.tile or times <= _NEAREST:
                    return min(size, max(times * smaller[other], _least(size, smaller[other], shrinking.tile)))
            if size == other + 1:
                return smaller[other] + 1
    least = _least(size, 1, shrinking.tile)
    taken = set(smaller.values())
    while least in taken and least < size:
        least = least * 2 if least % 2 == 0 else least + 2
    return min(least, size)


def _least(size: int, unit: int, tile: int) -> int:
    """The least multiple of `unit` that looks as the size does: a tile of a power of two, or odd."""
    if size % 16 == 0:
        return -(-tile // unit) * unit
    if unit > 1:
        return unit
    return min(size, 13 if size % 2 else 14)
