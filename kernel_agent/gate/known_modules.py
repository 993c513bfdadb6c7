"""The inventory of all modules, with what the server of all processes has taken of it before any of them began.

A process takes another one of what is different in it: what no process changes is looked at once.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernel_agent.gate.inventory import Inventory, Space, differ, inside

_COMPLETED = "torch._C._distributed."
"""Classes that torch gives their methods when its tensors on several devices are first wanted."""


@dataclass(frozen=True)
class Part:
    """An inventory but for what stands in another one."""

    inventory: Inventory
    kernels: tuple[tuple[Any, ...], ...]
    """Those that are compared, as `inside` tells of them."""
    spaces: frozenset[int] = frozenset()
    """Positions of those that are left out."""
    functions: frozenset[int] = frozenset()
    """Positions of those that are left out."""

    def touched(self) -> Iterator[Space]:
        """The spaces that may hold other values by now."""
        found = self.inventory.touched(self.inventory.stamped())
        return (self.inventory.spaces[i] for i in found if i not in self.spaces)

    def exchanged(self) -> Iterator[Any]:
        """The functions and kernels that something was exchanged in."""
        found = self.inventory.exchanged(self.inventory.stamped())
        yield from (self.inventory.functions[i] for i in found if i not in self.functions)
        yield from (look[0] for look in self.kernels if differ(look, inside(look[0])))


@dataclass(frozen=True)
class First:
    """What the server has taken."""

    modules: Mapping[str, Any]
    inventory: Inventory
    places: Mapping[str, range]
    """Positions of each module with its classes."""
    functions: frozenset[int]
    """Their addresses."""


class _Server:
    first: First | None = None


def take_first() -> None:
    """Take the inventory of all that is imported, which processes that are forked from this one then need not."""
    modules, kinds = dict(sys.modules), dict[type, bool]()
    found = {place: list(_spaces_of(place, module, kinds)) for place, module in modules.items()}
    inventory = Inventory(itertools.chain.from_iterable(found.values()))
    ends = itertools.accumulate(map(len, found.values()))
    places = {place: range(end - len(found[place]), end) for place, end in zip(found, ends, strict=True)}
    _Server.first = First(modules, inventory, places, frozenset(map(id, inventory.functions)))


def all_but(own: str | None, modules: Mapping[str, Any], besides: Iterable[Any]) -> tuple[Part, ...]:
    """The inventory of all modules but one, of what they define, and of functions and kernels besides."""
    first, kinds = _Server.first, dict[type, bool]()
    stamps = None if first is None else first.inventory.stamped()
    if first is None or stamps is None:
        found = (_spaces_of(place, module, kinds) for place, module in modules.items() if place != own)
        inventory = Inventory(itertools.chain.from_iterable(found), besides)
        return (Part(inventory, tuple(inventory.kernels)),)
    touched = first.inventory.touched(stamps)
    names = {place for place, module in first.modules.items() if modules.get(place) is not module}
    names |= {space.place for space in map(first.inventory.spaces.__getitem__, touched) if _is_module(space.space)}
    left = {i for place in names for i in first.places[place]}
    again = [first.inventory.spaces[i][:2] for i in touched if i not in left]
    for place, module in modules.items():
        if place in names or (place not in first.modules and place != own):
            again += _spaces_of(place, module, kinds)
    exchanged = frozenset(first.inventory.exchanged(stamps))
    kernels = (look[0] for look in first.inventory.kernels)
    others = (*besides, *(first.inventory.functions[i] for i in exchanged), *kernels)
    more = Inventory(again, others, first.functions)
    return Part(first.inventory, (), frozenset((*left, *touched)), exchanged), Part(more, tuple(more.kernels))


def _is_module(space: types.ModuleType | type) -> bool:
    return isinstance(space, types.ModuleType)


def _spaces_of(place: str, module: Any, kinds: dict[type, bool]) -> Iterator[tuple[str, types.ModuleType | type]]:
    """A module and the classes that it defines; `kinds` keeps whether objects of a type are classes."""
    if not isinstance(module, types.ModuleType):
        return
    yield place, module
    if f"{place}.".startswith(_COMPLETED):
        return
    for name, value in list(vars(module).items()):
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, type)
        if kinds[kind] and vars(value).get("__module__") == place:
            yield f"{place}.{name}", value
