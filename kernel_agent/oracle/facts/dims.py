"""Names for sizes: which dims of a SWEEP entry a tensor's size is made of, found by changing one dim at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kernel_agent.oracle.facts.watch import Given
from kernel_agent.pairs.spec import ShapeEntry


@dataclass(frozen=True)
class Change:
    """One dim at another value, and what the launches were given then."""

    name: str
    before: int
    after: int
    launches: tuple[Given, ...]


@dataclass(frozen=True)
class Dims:
    """Names for the sizes of the launches of one call."""

    entry: ShapeEntry
    launches: tuple[Given, ...] = ()
    changes: tuple[Change, ...] = ()
    _known: dict[tuple[int, str, int], str] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Whole-number dims of the entry."""
        return {name: value for name, value in self.entry.dims.items() if type(value) is int}

    def of(self, launch: int, parameter: str, dim: int) -> str:
        """Name of one size of a launch's argument: `N`, `B*T`, `N/64`, a number, or `Y.size(1)`."""
        key = (launch, parameter, dim)
        if key not in self._known:
            name = self._named(lambda given: given.tensors[parameter].size[dim], launch)
            self._known[key] = name or f"{parameter}.size({dim})"
        return self._known[key]

    def by_size(self, size: int) -> str:
        """Name of a size that no launch was given: equal to one dim, or to a product of two."""
        return by_size(size, self.sizes)

    def _named(self, read: Callable[[Given], int], launch: int) -> str:
        if launch >= len(self.launches):
            return ""
        size = read(self.launches[launch])
        if not self.changes:
            return self.by_size(size)
        moved: list[tuple[Change, int]] = []
        for change in self.changes:
            try:
                after = read(change.launches[launch])
            except (IndexError, KeyError):  # another launch altogether at that size
                continue
            if after != size:
                moved.append((change, after))
        return expression(size, moved)


def dims_of(entry: ShapeEntry, given: Callable[[ShapeEntry], tuple[Given, ...]]) -> Dims:
    """Probe the dims of an entry; `given` tells what launches get at another one, and may raise for sizes it refuses.

    Without any answer, sizes are named by what they equal.
    """
    try:
        base = given(entry)
    except Exception:  # the user's code at our sizes: names are then a guess by equality
        return Dims(entry)
    changes = []
    for name, value in entry.dims.items():
        if type(value) is not int:
            continue
        for other in _others(value):
            try:
                found = given(entry.model_copy(update={"dims": {**entry.dims, name: other}}))
            except Exception:  # a size that the stub refuses
                continue
            if [one.kernel for one in found] == [one.kernel for one in base]:
                changes.append(Change(name, value, other, found))
                break
    return Dims(entry, base, tuple(changes))


def _others(value: int) -> Sequence[int]:
    return [other for other in (2 * value, value + 1, value // 2) if other > 0 and other != value]


def expression(size: int, moved: Sequence[tuple[Change, int]]) -> str:
    """A size by the dims that move it, each with the size at its other value; empty where they do not explain it."""
    if not moved:
        return str(size)
    if len(moved) == 1:
        change, after = moved[0]
        return _of_one(size, after, change.name, change.before, change.after)
    product = math.prod(change.before for change, _ in moved)
    names = "*".join(change.name for change, _ in moved)
    if product == size:
        return names
    if product and size % product == 0:
        return f"{size // product}*{names}"
    if sum(change.before for change, _ in moved) == size:
        return "+".join(change.name for change, _ in moved)
    return ""


def _of_one(size: int, after: int, name: str, before: int, changed: int) -> str:
    if size == before and after == changed:
        return name
    if size % before == 0 and after == size // before * changed:
        return f"{size // before}*{name}"
    if after - size == changed - before:
        return f"{name}{size - before:+d}"
    for block in (2**power for power in range(1, 13)):
        if -(-before // block) == size and -(-changed // block) == after:
            return f"{name}/{block}"
    if size and before % size == 0 and after * (before // size) == changed:
        return f"{name}/{before // size}"
    if size == 2**before and after == 2**changed:
        return f"2**{name}"
    return ""


def by_size(size: int, sizes: Mapping[str, int]) -> str:
    """A dim that has this size, a product or quotient of two, a small multiple or half of one; else the number."""
    names = [name for name, value in sizes.items() if value == size]
    if names and size > 1:
        return names[0]
    listed = [(name, value) for name, value in sizes.items() if value > 1]
    for place, (first, n) in enumerate(listed):
        for second, m in listed[place + 1 :]:
            if n * m == size:
                return f"{first}*{second}"
    quotients = [f"{one}/{other}" for one, n in listed for other, m in listed if m > 2 and n == size * m]
    if size > 2 and len(quotients) == 1:
        return quotients[0]
    for factor in (2, 3, 4):
        for name, value in listed:
            if value > 2 and size == factor * value:
                return f"{factor}*{name}"
    for name, value in listed:
        if size > 4 and 2 * size == value:
            return f"{name}/2"
    return str(size)
