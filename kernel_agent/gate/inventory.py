"""What the names of some modules and classes stand for at one time, and what is in the functions among that.

What may be others later is told by stamps, without a look at what stayed the same (`raw_words`), and compared by
identity then: what was put in may say of itself that it is equal.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from triton.runtime.jit import JITFunction

from kernel_agent.gate.raw_words import PARTS, VERSION, Words, dict_of

_WITH_CODE = frozenset({types.FunctionType, JITFunction})
_PARTS = tuple(map(operator.attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))
"""What can be exchanged in a function that stays the same."""


class Space(NamedTuple):
    """A module or a class, and what its names stood for."""

    place: str
    space: types.ModuleType | type
    old: Mapping[str, Any]


@dataclass(frozen=True)
class Stamps:
    """Numbers that are others as soon as something has changed: a row for each space, function, function with named
    defaults."""

    spaces: NDArray[np.uint64]
    functions: NDArray[np.uint64]
    defaults: NDArray[np.uint64]


class Inventory:
    """Of modules and classes, of what they hold, and of functions and kernels besides.

    `known` has the addresses of functions that are none of this inventory's unless they are among those besides.
    """

    def __init__(
        self,
        spaces: Iterable[tuple[str, types.ModuleType | type]],
        besides: Iterable[Any] = (),
        known: Container[int] = (),
    ) -> None:
        self.spaces = [Space(place, space, dict(vars(space))) for place, space in spaces]
        names = itertools.chain.from_iterable(space.old.values() for space in self.spaces)
        held = {id(value): value for value in names if type(value) in _WITH_CODE and id(value) not in known}
        held |= {id(value): value for value in besides if type(value) in _WITH_CODE}
        self.kernels = [inside(value) for value in held.values() if type(value) is JITFunction]
        self.functions = [value for value in held.values() if type(value) is types.FunctionType]
        self._parts = [list(map(part, self.functions)) for part in _PARTS]
        self._named = [(i, inside(one)) for i, one in enumerate(self.functions) if one.__kwdefaults__]
        self._words = self._readable()
        self._stamps = self.stamped()

    def _readable(self) -> tuple[Words, Words, Words] | None:
        dicts = [dict_of(space) for _, space, _ in self.spaces]
        if PARTS is None or VERSION is None or any(names is None for names in dicts):
            return None
        defaults = [id(self.functions[i].__kwdefaults__) for i, _ in self._named]
        return (
            Words(list(map(id, dicts)), [VERSION]),
            Words(list(map(id, self.functions)), PARTS),
            Words(defaults, [VERSION]),
        )

    def stamped(self) -> Stamps | None:
        """The stamps now; None where there are none, and everything has to be looked at."""
        return None if self._words is None else Stamps(*(words.read() for words in self._words))

    def touched(self, now: Stamps | None) -> list[int]:
        """Positions of the spaces that may hold other values."""
        return self._others("spaces", now, len(self.spaces))

    def exchanged(self, now: Stamps | None) -> list[int]:
        """Positions of the functions in which something is exchanged."""
        at = self._others("functions", now, len(self.functions))
        parts = list(zip(_PARTS, self._parts, strict=True))
        found = [i for i in at if any(part(self.functions[i]) is not old[i] for part, old in parts)]
        named = self._others("defaults", now, len(self._named))
        looks = (self._named[at] for at in named)
        return [*found, *(i for i, look in looks if differ(look, inside(self.functions[i])))]

    def _others(self, kind: str, now: Stamps | None, size: int) -> list[int]:
        if self._stamps is None or now is None:
            return list(range(size))
        differs: NDArray[np.bool_] = getattr(self._stamps, kind) != getattr(now, kind)
        return [int(i) for i in np.flatnonzero(differs.any(axis=1))]


def inside(value: Any) -> tuple[Any, ...]:
    """A kernel and what can be exchanged in it; of a function, the defaults of parameters that have names."""
    if isinstance(value, JITFunction):
        source = (value.raw_src, getattr(value, "src", ""))
        return value, value.fn, value.fn.__code__, *source, vars(value).get("run"), *value.pre_run_hooks
    named = value.__kwdefaults__ or {}
    return (value, value.__kwdefaults__, *named, *named.values())


def differ(old: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """By identity: what was put in may say of itself that it is equal."""
    return len(old) != len(now) or any(map(operator.is_not, old, now))
