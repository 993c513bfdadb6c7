"""Shapes that a plan derives from those of SWEEP: odd neighbours, one element, several tiles along every axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kernel_agent.gate.options import GateOptions
from kernel_agent.pairs.spec import ShapeEntry

_TILE = 128
"""Edge of a tile that hardly a kernel exceeds: a size of one more has two tiles, the second with one element."""
_TILES = 8
"""Tiles that grouped orders take before they begin again; a wide shape has one more along an axis."""
_LONG = 4097
"""One element more than a row that a program takes at once in most kernels."""
_WIDE, _NARROW = 128, 192
"""Whole numbers of tiles: a size at which no tile of up to 128 is cut, and one at which only wider ones than 64 are."""
_TILED = 32
"""A size that some entry has so large is cut into tiles."""
_COUNTS = 8
"""Sizes below it count batches, heads and the like."""
_ONES = 8
"""Shapes with a dim of one element at most."""
_ONCE_SHARE = 4
"""A shape that is asked once has arguments of at most such a part of the elements that others may have."""
_TILED_SHARE = 2
"""That part for shapes with several tiles along several axes, of which there are no smaller ones."""


@dataclass(frozen=True)
class Alternatives:
    """Shapes of which one is asked: the first that is not too large."""

    entries: tuple[ShapeEntry, ...]
    share: int = _ONCE_SHARE
    """Its arguments may have one part in `share` of the elements that those of an entry of SWEEP may have."""


def odd_entries(entries: list[ShapeEntry]) -> list[ShapeEntry]:
    """Odd neighbours of the smallest entry of each combination of flags, most telling first, without repetitions."""
    bases: dict[str, ShapeEntry] = {}
    for entry in sorted(entries, key=lambda e: sum(_sizes(e).values())):
        flags = {name: value for name, value in entry.dims.items() if type(value) is not int}
        bases.setdefault(repr(sorted(flags.items(), key=str)), entry)
    found: dict[str, ShapeEntry] = {}
    for number, base in enumerate(bases.values()):
        for derived in (
            _neighbours(base) if number == 0 else [_changed(base, {n: _prime(v) for n, v in _sizes(base).items()})]
        ):
            found.setdefault(derived.label, derived)
    return list(found.values())


def _neighbours(base: ShapeEntry) -> Iterator[ShapeEntry]:
    sizes = _sizes(base)
    largest_first = sorted(sizes, key=lambda name: -sizes[name])
    yield _changed(base, {name: _prime(size) for name, size in sizes.items()})
    for name in largest_first:
        yield _changed(base, {name: _prime(sizes[name])})
    for name in largest_first:
        yield _changed(base, {name: 1})
    for step in (1, -1):
        for name in largest_first:
            if sizes[name] + step >= 1:
                yield _changed(base, {name: sizes[name] + step})


def tiled_entries(entries: Sequence[ShapeEntry], options: GateOptions) -> list[ShapeEntry]:
    """The smallest entry with two tiles or more along its three largest dims, or two of them; then wide ones.

    Of a wide one a dim has more tiles than a grouped order takes at once, which is more than one block of a thousand,
    and another one may have two. What has two sizes at most, as rows have, gets long ones too: in others, each element
    may meet each other one. Sizes that count batches or heads stay as they are; whether a row's few are a count is
    told by all entries.
    """
    base = min(entries, key=lambda e: sum(_sizes(e).values()), default=None)
    if base is None:
        return []
    sizes = _sizes(base)
    largest = sorted((name for name in sizes if sizes[name] >= _COUNTS), key=lambda name: -sizes[name])[:3]
    groups = [largest, *(list(pair) for pair in combinations(largest, 2))] if len(largest) > 2 else [largest]
    if len(sizes) <= 2:
        groups = [[name for name in sizes if _largest(entries, name) >= _COUNTS]]
    found = [_changed(base, {name: max(sizes[name], _TILE + 1) for name in names}) for names in groups if names]
    for one in largest:
        wide = {one: _TILES * _TILE + 1}
        found.append(_changed(base, wide))
        found += [_changed(base, {**wide, other: max(sizes[other], _TILE + 1)}) for other in largest if other != one]
    found += [_changed(base, {one: _LONG}) for one in largest if len(sizes) <= 2]
    return [entry for entry in found if math.prod(_sizes(entry).values()) <= options.max_volume // 2]


def apart_entries(entries: list[ShapeEntry], known: Collection[str], options: GateOptions) -> list[Alternatives]:
    """Shapes that are asked once: with several tiles, one dim at a time wide, and one dim at a time of one element."""
    base = min(entries, key=lambda e: sum(_sizes(e).values()), default=None)
    if base is None or options.odd_sizes == 0:
        return []
    sizes = _sizes(base)
    tiled = tiled_entries(entries, options)
    wide = [entry for entry in tiled if _raised(entry, base) == 1]
    several = [entry for entry in tiled if entry not in wide and max(_sizes(entry).values()) <= _TILES * _TILE]
    ones = [_changed(base, {name: 1}) for name in sizes if sizes[name] > 1]
    # Axes in pairs stand in for three at once; where that is too much work whatever the arguments, each pair is asked.
    together = bool(several) and _raised(several[0], base) > 2
    less = _beside(base, min(sizes, key=sizes.__getitem__), options) if len(sizes) == 2 else ()
    share = _ONCE_SHARE if less else _TILED_SHARE
    groups = [
        *(Alternatives((*group, *less), share) for group in ([several] if together else [[e] for e in several])),
        *(Alternatives((entry, *_less_wide(entry, base))) for entry in wide),
        *(Alternatives((entry,)) for entry in ones[:_ONES]),
    ]
    groups += _beyond_one_tile(entries, base, groups, options)
    groups += _whole(entries, base, options)
    found = {group.entries[0].label: group for group in groups if group.entries}
    return [group for label, group in found.items() if label not in known]


def _less_wide(wide: ShapeEntry, base: ShapeEntry) -> Iterator[ShapeEntry]:
    """The same dim with half and a quarter of the tiles of a wide one, last beside others that are halved."""
    sizes = _sizes(base)
    for name, size in sizes.items():
        if _sizes(wide)[name] != size:
            for tiles in (_TILES // 2, _TILES // 4):
                last = {name: max(size, tiles * _TILE + 1)}
                yield _changed(base, last)
            yield _changed(base, {other: s // 2 for other, s in sizes.items() if s >= _COUNTS} | last)


def _beyond_one_tile(
    entries: Sequence[ShapeEntry], base: ShapeEntry, groups: Sequence[Alternatives], options: GateOptions
) -> Iterator[Alternatives]:
    """Two tiles along each size that neither SWEEP nor one of the `groups` has so many of, beside ever smaller others.

    They are sizes that only other entries show to be none that counts, and those of products too large to be asked.
    """
    for name in _sizes(base):
        here = (group.entries for group in groups)
        if _COUNTS <= _largest(entries, name) <= _TILE and not any(_least(asked, name) > _TILE for asked in here):
            found = _beside(base, name, options)
            if found:
                yield Alternatives(found)


def _whole(entries: Sequence[ShapeEntry], base: ShapeEntry, options: GateOptions) -> Iterator[Alternatives]:
    """Whole numbers of tiles along all sizes of which no entry has such: all others are odd, and cut their last tile.

    Where that is too much work, along fewer of them.
    """
    sizes = _sizes(base)
    tiled = sorted((name for name in sizes if _largest(entries, name) >= _TILED), key=lambda name: -sizes[name])[:3]
    for whole in (_WIDE, _NARROW):
        lacking = [name for name in tiled if not any(_cuts_alike(_sizes(e).get(name, 0), whole) for e in entries)]
        choices = (lacking[: len(lacking) - fewer] for fewer in range(len(lacking)))
        found = [_changed(base, dict.fromkeys(names, whole)) for names in choices]
        fitting = [entry for entry in found if math.prod(_sizes(entry).values()) <= options.max_volume // 2]
        if fitting:
            yield Alternatives(tuple(fitting))


def _cuts_alike(size: int, whole: int) -> bool:
    """Whether tiles of a size are whole where those of another one are, as far as tiles of 32 and 128 tell."""
    return size > 0 and all((size % tile == 0) == (whole % tile == 0) for tile in (_TILED, _TILE))


def _beside(base: ShapeEntry, name: str, options: GateOptions) -> tuple[ShapeEntry, ...]:
    """Two tiles along one dim beside others that are as they were, halved and quartered."""
    sizes = _sizes(base)
    others = ({other: s // part for other, s in sizes.items() if s >= _COUNTS} for part in (1, 2, 4))
    found = [_changed(base, {**smaller, name: _TILE + 1}) for smaller in others]
    return tuple(entry for entry in found if math.prod(_sizes(entry).values()) <= options.max_volume // 2)


def _largest(entries: Sequence[ShapeEntry], name: str) -> int:
    return max(_sizes(entry).get(name, 0) for entry in entries)


def _least(entries: Sequence[ShapeEntry], name: str) -> int:
    return min(_sizes(entry).get(name, 0) for entry in entries)


def _raised(entry: ShapeEntry, base: ShapeEntry) -> int:
    """How many dims of an entry differ from those of the one that it was derived from."""
    return sum(base.dims[name] != size for name, size in _sizes(entry).items())


def _sizes(entry: ShapeEntry) -> dict[str, int]:
    return {name: value for name, value in entry.dims.items() if type(value) is int and value > 0}


def _changed(base: ShapeEntry, dims: dict[str, int]) -> ShapeEntry:
    return ShapeEntry(dims={**base.dims, **dims}, required=False)


def _prime(size: int) -> int:
    """The smallest odd prime above `size`."""
    number = max(3, size + 1)
    while any(number % d == 0 for d in range(2, int(number**0.5) + 1)):
        number += 1
    return number
