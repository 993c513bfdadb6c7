"""Which elements of a buffer the programs of a launch touch: counted, and marked once each.

Lanes come as terms (see `lazy`). Terms that vary along different dimensions of a tile are independent: the lanes of a
program are the product of theirs, so that they need not be written out to be counted. Programs whose terms are equal
touch the same elements and are marked together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernel_agent.ir.cost.intervals import ElementSet

SECTOR_BITS = 5
SECTOR = 1 << SECTOR_BITS
"""Bytes that memory moves at least."""

_TOGETHER = 1 << 18
"""Lanes written out at once."""
_REMEMBERED = 4096
"""An access that has more different tiles at a time is not asked whether it had them before."""
_WORTH = 512
"""Nor is one with fewer lanes in a tile: marking them again is cheaper than asking."""
_ABSENT_LANE = 0x5BD1E995
_FAR = 1 << 62
_RUN = 8
"""Consecutive elements from which on a run is kept as such."""


@dataclass(eq=False)
class Group:
    """Terms that vary along the same dimensions of a tile."""

    dims: frozenset[int]
    """Dimensions of the tensors, counted with the program dimension in front."""
    offset: Tensor | None
    mask: Tensor | None

    @cached_property
    def along(self) -> tuple[int, ...]:
        """The dimensions in order; the program dimension is never among them."""
        return tuple(sorted(self.dims))

    def lanes(self, tile: Sequence[int]) -> Tensor:
        """How many combinations take part, `[P or 1]`."""
        if self.mask is None:
            return torch.tensor([math.prod(tile[dim - 1] for dim in self.along)])
        shape = [self.mask.size(0), *[tile[dim - 1] if dim in self.dims else 1 for dim in range(1, self.mask.dim())]]
        return self.mask.expand(shape).flatten(1).sum(1)

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest offset of lanes that take part, each `[P or 1]`."""
        if self.offset is None:
            zero = torch.zeros(1, dtype=torch.int64)
            return zero, zero
        low = high = self.offset
        if self.mask is not None:
            low, high = torch.where(self.mask, low, _FAR), torch.where(self.mask, high, -_FAR)
        return low.flatten(1).amin(1), high.flatten(1).amax(1)

    def keys(self) -> Tensor:
        """A number per program, `[P or 1]`, equal for equal offsets and masks."""
        value = torch.zeros((), dtype=torch.int64) if self.offset is None else self.offset
        if self.mask is not None:
            value = torch.where(self.mask, value, _ABSENT_LANE)
        flat = value.flatten(1) if value.dim() else value.view(1, 1)
        return (flat * _weights(flat.size(1))).sum(1)


def grouped(offsets: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Group]:
    """Terms sorted into groups of disjoint dimensions. All tensors have one rank."""
    groups: list[Group] = []
    for term, is_mask in [*((term, False) for term in offsets), *((term, True) for term in masks)]:
        dims = frozenset(dim for dim in range(1, term.dim()) if term.size(dim) > 1)
        mine = Group(dims, None if is_mask else term, term if is_mask else None)
        for group in [group for group in groups if group.dims & dims or group.dims == dims]:
            groups.remove(group)
            mine = Group(
                mine.dims | group.dims,
                _both(mine.offset, group.offset, torch.add),
                _both(mine.mask, group.mask, torch.logical_and),
            )
        groups.append(mine)
    return groups


class Footprint:
    """How one buffer is touched in one way."""

    def __init__(self, size: int, itemsize: int) -> None:
        self.size = size
        self.itemsize = itemsize
        self.lanes = 0
        """Lanes that touched an element, each as often as it did."""
        self.bytes = 0
        """Bytes of those lanes."""
        self.sectors = 0
        """Memory sectors, each counted once per program and access."""
        self._written = 0
        self._elements = ElementSet(size)
        self._seen: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def elements(self) -> int:
        """How many different elements were touched."""
        return len(self._elements)

    def union(self, other: Footprint) -> int:
        """How many different elements of the same buffer either of two touched."""
        return len(self._elements | other._elements)

    def add(
        self,
        offsets: Sequence[Tensor],
        masks: Sequence[Tensor],
        tile: Sequence[int],
        programs: int,
        width: int | None = None,
    ) -> int:
        """Programs touch the elements at the sum of `offsets` where all `masks` hold.

        Terms are `[P or 1, *tile]` with tile dimensions lazily broadcast, offsets int64; lanes outside of the buffer
        touch nothing. `width` is how many bytes of an element they touch, by default all. Returns how many lanes were
        written out to be marked.
        """
        if not tile:
            tile = (1,)
            offsets, masks = ([term.view(-1, 1) for term in terms] for terms in (offsets, masks))
        groups = grouped(offsets, [term for term in masks if term.numel() > 1 or not bool(term)])
        lanes = functools.reduce(torch.mul, [group.lanes(tile) for group in groups])
        if not self._inside(groups, lanes > 0):
            groups = [self._clipped(groups)]
            lanes = groups[0].lanes(tile)
        covered = frozenset().union(*[group.dims for group in groups])
        repeated = math.prod(size for dim, size in enumerate(tile, 1) if dim not in covered)
        total = int(lanes.sum()) * repeated * (programs // lanes.size(0))
        self.lanes += total
        self.bytes += total * (self.itemsize if width is None else width)
        before = self._written
        self._mark(groups, lanes > 0, tuple(tile), programs)
        return self._written - before

    def _inside(self, groups: list[Group], alive: Tensor) -> bool:
        """Whether all lanes that take part are in the buffer."""
        plain = [group.offset.aminmax() for group in groups if group.offset is not None]
        if sum(int(low) for low, _ in plain) >= 0 and sum(int(high) for _, high in plain) < self.size:
            return True
        low = functools.reduce(torch.add, [group.extremes()[0] for group in groups])
        high = functools.reduce(torch.add, [group.extremes()[1] for group in groups])
        return not bool((alive & ((low < 0) | (high >= self.size))).any())

    def _clipped(self, groups: list[Group]) -> Group:
        """All terms written out, without lanes outside of the buffer."""
        offset, mask = _written_out(groups, slice(None))
        inside = (offset >= 0) & (offset < self.size)
        dims = frozenset().union(*[group.dims for group in groups])
        return Group(dims, offset, inside if mask is None else inside & mask)

    def _mark(self, groups: list[Group], alive: Tensor, tile: tuple[int, ...], programs: int) -> None:
        keys = functools.reduce(torch.add, [group.keys() * (2 * k + 1) for k, group in enumerate(groups)])
        keys, alive = torch.broadcast_tensors(keys, alive)
        rows = alive.nonzero().flatten()
        if rows.numel() == 0:
            return
        each = programs // keys.numel()
        different, place, counts = keys[rows].unique(return_inverse=True, return_counts=True)
        first = torch.empty_like(different).scatter_(0, place, rows)
        if different.numel() > _REMEMBERED or math.prod(tile) < _WORTH:
            self._write(groups, first, counts * each)
            return
        new = []
        for k, (key, count) in enumerate(zip(different.tolist(), counts.tolist(), strict=True)):
            known = self._seen.get((key, tile))
            if known is None:
                new.append(k)
            else:
                self.sectors += known * count * each
        if new:
            chosen = torch.tensor(new)
            sectors = self._write(groups, first[chosen], counts[chosen] * each)
            for key, found in zip(different[chosen].tolist(), sectors.tolist(), strict=True):
                self._seen[key, tile] = found

    def _write(self, groups: list[Group], rows: Tensor, counts: Tensor) -> Tensor:
        """Mark the lanes of the programs at `rows`, which stand for `counts` programs; the sectors of each."""
        run = next((found for found in map(_run, groups) if found is not None), None)
        if run is not None:
            groups = [run.start if group is run.group else group for group in groups]
        tile = torch.broadcast_shapes(*[t.shape[1:] for g in groups for t in (g.offset, g.mask) if t is not None])
        found = []
        for part in rows.split(max(1, _TOGETHER // max(1, math.prod(tile)))):
            offset, mask = _written_out(groups, part)
            self._written += offset.numel()
            length = None if run is None else run.lengths(part).view(-1, *[1] * (offset.dim() - 1))
            if length is None:
                self._elements.add(_selected(offset, mask))
            else:
                whole = torch.broadcast_shapes(offset.shape, length.shape)
                offset, mask = offset.expand(whole), None if mask is None else mask.expand(whole)
                self._elements.add_runs(_selected(offset, mask), _selected(length.expand(whole), mask))
            found.append(_sectors(offset, mask, length, self.itemsize).expand(part.numel()))
        sectors = torch.cat(found)
        self.sectors += int((sectors * counts).sum())
        return sectors


@dataclass(eq=False)
class Run:
    """A group whose lanes are consecutive elements."""

    group: Group
    start: Group
    """Its first lane alone."""
    length: Tensor
    """How many lanes take part, `[P or 1]`: the first ones."""

    def lengths(self, rows: Tensor) -> Tensor:
        """Of some programs, `[rows or 1]`."""
        return self.length if self.length.numel() == 1 else self.length[rows]


def _run(group: Group) -> Run | None:
    """The group as a run, if it is one."""
    if group.offset is None or len(group.dims) != 1 or group.offset.size(0) != 1:
        return None
    line = group.offset.reshape(-1)
    if line.numel() < _RUN or not bool((line.diff() == 1).all()):
        return None
    first = (slice(None), *[slice(0, 1)] * (group.offset.dim() - 1))
    start = Group(frozenset(), group.offset[first], None)
    if group.mask is None:
        return Run(group, start, torch.tensor([line.numel()]))
    flags = group.mask.flatten(1)
    if bool((flags[:, 1:] & ~flags[:, :-1]).any()):
        return None
    return Run(group, start, flags.sum(1))


def _selected(value: Tensor, mask: Tensor | None) -> Tensor:
    return value.reshape(-1) if mask is None else value.masked_select(mask)


def _written_out(groups: list[Group], rows: Tensor | slice) -> tuple[Tensor, Tensor | None]:
    """Offsets and mask of some programs, both broadcast to one shape."""

    def taken(term: Tensor) -> Tensor:
        return term if term.size(0) == 1 else term[rows]

    rank = next(t for g in groups for t in (g.offset, g.mask) if t is not None).dim()
    offset = torch.zeros((1,) * rank, dtype=torch.int64)
    mask: Tensor | None = None
    for group in groups:
        offset = offset if group.offset is None else offset + taken(group.offset)
        mask = _both(mask, None if group.mask is None else taken(group.mask), torch.logical_and)
    if mask is None:
        return offset, None
    both = torch.broadcast_tensors(offset, mask)
    return both[0], both[1]


def _sectors(offset: Tensor, mask: Tensor | None, length: Tensor | None, itemsize: int) -> Tensor:
    """Different sectors that each program touches, `[P or 1]`; each lane is a run of `length` elements, or one."""
    order = _by_address(offset)
    first = ((offset * itemsize) >> SECTOR_BITS).permute(order)
    last = first if length is None else (((offset + length) * itemsize - 1) >> SECTOR_BITS).permute(order)
    if mask is not None:
        inside = mask.permute(order)
        first, last = torch.where(inside, first, -1), torch.where(inside, last, -1)
    first, last = first.flatten(1), last.flatten(1)
    if mask is not None:  # lanes that take no part stand at the sectors before them
        filled = last.cummax(1).values
        if bool(((filled == last) | (last < 0)).all()):
            first, last = torch.where(last < 0, filled + 1, first), filled
    if bool((first.diff(dim=1) < 0).any()):
        first, place = first.sort(1)
        last = last.gather(1, place)
    before = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1].cummax(1).values], 1)
    return (last - torch.maximum(first - 1, before)).clamp(min=0).sum(1)


def _by_address(offset: Tensor) -> list[int]:
    """Dimensions in an order that makes addresses ascend, where strides tell."""
    strides = [0] * offset.dim()
    for dim in range(1, offset.dim()):
        if offset.size(dim) > 1:
            line = offset[tuple(slice(0, 2) if d == dim else 0 for d in range(offset.dim()))]
            strides[dim] = abs(int(line[1] - line[0]))
    return [0, *sorted(range(1, offset.dim()), key=lambda dim: -strides[dim])]


@functools.lru_cache(maxsize=64)
def _weights(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) | 1


def _both(a: Tensor | None, b: Tensor | None, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)
