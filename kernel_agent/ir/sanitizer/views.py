"""What of a storage the pointer of one argument may touch.

A kernel that is given `x[:, :100]` of a wider storage must not read column 100, although there is memory. Nor may it
read `k` through the pointer of `q` where both are slices of one `qkv`. But a stub may well pass the first row and a
stride, and let the kernel walk to the rows of its neighbours. The rule:

- what a caller gave the stub is a limit: its elements, and no others of its storage;
- a view that the stub made of it leaves a dimension free that it selects one index of (`x[0]`, `x[:, 3:4]`), and limits
  one that it slices (`x[:, :100]`, a chunk of `qkv`);
- a view that no tensor of the caller contains (`as_strided` beyond it) is limited by its storage alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Sizes, strides and offset of a tensor in its storage, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """The geometry of a tensor."""
        return _geometry(tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def elements(self) -> int:
        """Number of indices."""
        return math.prod(self.size)

    @cached_property
    def high(self) -> int:
        """The last element reached; one before the offset when there is none."""
        if self.elements == 0:
            return self.offset - 1
        return self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @cached_property
    def dims(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of the dimensions that move, outermost first."""
        moving = [(n, s) for n, s in zip(self.size, self.stride, strict=True) if n != 1 and s != 0]
        return tuple(sorted(moving, key=lambda dim: -dim[1]))

    @cached_property
    def merged(self) -> Geometry:
        """The same elements with as few dimensions as possible."""
        if self.elements == 0:
            return Geometry((0,), (1,), self.offset)
        found: list[tuple[int, int]] = []
        for n, s in self.dims:
            if found and found[-1][1] == n * s:
                found[-1] = (found[-1][0] * n, s)
            else:
                found.append((n, s))
        return Geometry(tuple(n for n, _ in found), tuple(s for _, s in found), self.offset)

    @property
    def dense(self) -> bool:
        """Whether every element from the first to the last is reached."""
        dims = self.merged.dims
        return self.elements == 0 or not dims or (len(dims) == 1 and dims[0][1] == 1)

    @cached_property
    def nested(self) -> bool:
        """Whether every dimension steps over all inner ones, so that an element has one index."""
        span = 0
        for n, s in reversed(self.dims):
            if s <= span:
                return False
            span += (n - 1) * s
        return True

    def index(self, element: int) -> tuple[int, ...] | None:
        """Index of an element of the storage, which may lie outside of the sizes; None when there is no such index."""
        rest, found = element - self.offset, [0] * len(self.size)
        order = sorted((d for d, s in enumerate(self.stride) if s > 0), key=lambda d: -self.stride[d])
        for place, dim in enumerate(order):
            last = place == len(order) - 1
            at = rest // self.stride[dim]
            if self.size[dim] == 1 and not last:  # the stride of a single index means nothing
                at = 0
            found[dim], rest = at, rest - at * self.stride[dim]
        return tuple(found) if rest == 0 and order else None

    def holds(self, element: int) -> bool:
        """Whether an element of the storage is reached by some index."""
        if not self.offset <= element <= self.high:
            return False
        merged = self.merged
        if not merged.nested:
            return True
        index = merged.index(element)
        inside = index is None or all(0 <= at < n for at, n in zip(index, merged.size, strict=True))
        return inside and (index is not None or element == self.offset)

    def within(self, outer: Geometry) -> Geometry | None:
        """What a view of `outer` with this geometry may touch of it; None when it is no view of it."""
        return _within(self, outer)

    def _find_within(self, outer: Geometry) -> Geometry | None:
        if self.elements == 0 or outer.elements == 0:
            return self if outer.offset <= self.offset <= outer.high + 1 else None
        if not (outer.offset <= self.offset and self.high <= outer.high):
            return None
        if not outer.nested:
            return outer
        return _closure(self, outer) or _closure(self, outer.merged) or outer


@lru_cache(maxsize=4096)
def _geometry(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Geometry:
    """One object for tensors of one form, which every call makes anew: what was found out about it stays known."""
    return Geometry(size, stride, offset)


@lru_cache(maxsize=4096)
def _within(view: Geometry, outer: Geometry) -> Geometry | None:
    return view._find_within(outer)


def _closure(view: Geometry, outer: Geometry) -> Geometry | None:
    """`outer` with the dimensions limited that the view slices; None where their dimensions do not correspond."""
    dims = outer.dims
    starts, rest = [], view.offset - outer.offset
    for n, s in dims:
        starts.append(min(rest // s, n - 1))
        rest -= starts[-1] * s
    if rest:
        return None
    steps: list[list[tuple[int, int]]] = [[] for _ in dims]
    for n, s in view.dims:
        place = next((d for d, (_, outer_step) in enumerate(dims) if outer_step <= s and s % outer_step == 0), None)
        if place is None:
            return None
        steps[place].append((n, s // dims[place][1]))
    size, offset = [], outer.offset
    for (n, s), start, moves in zip(dims, starts, steps, strict=True):
        end = start + sum((count - 1) * step for count, step in moves)
        if end >= n:
            return None
        if not moves:
            start, end = 0, n - 1
        else:  # every other column of x leaves the columns between them free
            end = min(n - 1, end + math.gcd(*[step for _, step in moves]) - 1)
        size.append(end - start + 1)
        offset += start * s
    return Geometry(tuple(size), tuple(s for _, s in dims), offset)


@dataclass(eq=False)
class View:
    """The elements that pointers from one argument may touch."""

    name: str
    """The argument."""
    shown: Geometry
    """The argument itself, for messages."""
    limits: tuple[Geometry, ...]
    """An element of any of these may be touched."""
    storage: int
    """Elements of the storage."""
    low: int = field(init=False)
    high: int = field(init=False)
    """First and last element that may be touched."""
    dense: bool = field(init=False)
    """Whether everything between them may be."""
    _reach: dict[torch.device, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        filled = [limit for limit in self.limits if limit.elements]
        self.low = min((limit.offset for limit in filled), default=0)
        self.high = max((limit.high for limit in filled), default=-1)
        self.dense = not filled or (len(filled) == 1 and filled[0].dense)

    def reach(self, device: torch.device | str = "cpu") -> Tensor:
        """Which elements of the storage may be touched, shape (storage,), bool."""
        device = torch.device(device)
        if device not in self._reach:
            found = self._reach[device] = torch.zeros(self.storage, dtype=torch.bool, device=device)
            for limit in self.limits:
                found.as_strided(limit.size, limit.stride, limit.offset).fill_(True)
        return self._reach[device]

    def touchable(self, offset: Tensor) -> Tensor:
        """Which of some elements of the storage may be touched, same shape, bool."""
        inside = (offset >= self.low) & (offset <= self.high)
        if self.dense:
            return inside
        return inside & self.reach(offset.device)[offset.clamp(0, self.storage - 1)]


@dataclass(eq=False)
class Extents:
    """The tensors over one storage that somebody knows: those the caller gave, or else the allocation."""

    storage: int
    """Elements of the storage."""
    whole: Geometry
    """The tensor that the storage was first met with."""
    given: dict[str, Geometry] = field(default_factory=dict)
    """Arguments of the stub by name."""
    _views: dict[tuple[Geometry, str], View] = field(default_factory=dict)

    def give(self, name: str, tensor: Tensor) -> None:
        """Note an argument of the stub."""
        self.given[name] = Geometry.of(tensor)
        self._views.clear()

    def view(self, tensor: Tensor, name: str) -> View:
        """What a kernel may touch that is given this tensor; `name` is its parameter."""
        geometry = Geometry.of(tensor)
        key = (geometry, name)
        if key not in self._views:
            owners = list(self.given.values()) or [self.whole]
            limits = dict.fromkeys(limit for owner in owners if (limit := geometry.within(owner)) is not None)
            if geometry in owners:  # q itself, even if a given qkv contains it too
                limits = {geometry: None}
            named = next((given for given, other in self.given.items() if other == geometry), name)
            found = tuple(limits) or (Geometry((self.storage,), (1,), 0),)
            self._views[key] = View(named, geometry, found, self.storage)
        return self._views[key]

    def neighbour(self, view: View, element: int) -> str | None:
        """Name of another argument that reaches an element and does not contain the view."""
        known = {**{other.name: other.shown for other in self._views.values()}, **self.given}
        ends = (view.shown.offset, view.shown.high)
        for name, other in known.items():
            if other != view.shown and other.holds(element) and not all(other.holds(end) for end in ends):
                return name
        return None

    def all(self, name: str) -> View:
        """What pointers may touch whose argument is not known: made of numbers, or of several arguments."""
        limits: Sequence[Geometry] = tuple(self.given.values()) or (Geometry((self.storage,), (1,), 0),)
        return View(name, Geometry((self.storage,), (1,), 0), tuple(limits), self.storage)
