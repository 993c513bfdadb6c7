"""Words in the memory of many objects at once: what objects refer to, read without counting a reference.

A child shares its server's memory until it writes there, and whoever looks at an object in Python writes to its count
of references: a look at all that modules hold copies a hundred megabytes. Where a word lies is found out on known
objects. In an interpreter that has no such word everything is looked at in Python.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = ctypes.sizeof(ctypes.c_uint64)
_HEAD = 2
"""Words that begin every object: its count of references and its type."""


class Words:
    """The words at some offsets of some objects, which must live as long as this."""

    def __init__(self, addresses: Sequence[int], offsets: Sequence[int]) -> None:
        at = np.array(addresses, np.int64).reshape(-1, 1) + np.array(offsets, np.int64)
        first, last = (int(at.min()), int(at.max())) if at.size else (id(self), id(self))
        memory: Any = (ctypes.c_uint64 * ((last - first) // _WORD + 1)).from_address(first)
        self._memory: NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
        self._places = (at - first) // _WORD

    def read(self) -> NDArray[np.uint64]:
        """A row for each object."""
        return self._memory.take(self._places)


def dict_of(space: types.ModuleType | type) -> dict[str, Any] | None:
    """The very dict of a module's or a class's names; None where it is made anew for everybody who asks."""
    names = vars(space)
    if isinstance(names, types.MappingProxyType):
        (names,) = gc.get_referents(names)
        same = gc.get_referents(vars(space))[0] is names
    else:
        same = vars(space) is names
    return names if isinstance(names, dict) and same else None


def _words_of(value: Any) -> list[int]:
    count = type(value).__basicsize__ // _WORD
    return list((ctypes.c_uint64 * count).from_address(id(value)))


def _places_in_functions() -> tuple[int, ...] | None:
    """Offsets of a function's code, its defaults, and its defaults of parameters that have names."""

    def known(one: Any = _HEAD, *, two: Any = _WORD) -> tuple[Any, Any]:
        return one, two

    words = _words_of(known)
    parts = [id(known.__code__), id(known.__defaults__), id(known.__kwdefaults__)]
    if any(words.count(part) != 1 for part in parts):
        return None
    return tuple(words.index(part) * _WORD for part in parts)


def _place_of_version() -> int | None:
    """Offset of the number that a dict gets with each change, which no other dict had and it never has again.

    Pythons have it up to 3.13.
    """
    module, space = types.ModuleType("known"), type("Known", (), {})
    plain: dict[str, Any] = {}
    places = set(range(_HEAD, dict.__basicsize__ // _WORD))
    for names, put, take in (
        (plain, plain.__setitem__, plain.__delitem__),
        (dict_of(module), partial(setattr, module), partial(delattr, module)),
        (dict_of(space), partial(setattr, space), partial(delattr, space)),
    ):
        if names is None:
            return None
        seen = [_words_of(names)]
        for name in ("one", "one", "one", "two", "one"):
            put(name, object())
            seen.append(_words_of(names))
        take("two")
        seen.append(_words_of(names))
        _ = names["one"], dict(names)
        quiet = _words_of(names)
        places = {at for at in places if len({words[at] for words in seen}) == len(seen) and quiet[at] == seen[-1][at]}
    return places.pop() * _WORD if len(places) == 1 else None


_KNOWN = sys.implementation.name == "cpython" and ctypes.sizeof(ctypes.c_void_p) == _WORD
VERSION = _place_of_version() if _KNOWN else None
"""See `_place_of_version`."""
PARTS = _places_in_functions() if _KNOWN else None
"""See `_places_in_functions`."""
