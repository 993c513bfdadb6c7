"""Which functions, classes and settings of other people's modules a candidate has replaced in its process.

A file that patches torch, NumPy or the clock does so in the user's program too, once it is delivered. Compared is what
the names of all modules and of their classes stand for, before the file is imported and after its last call, not what
its text says. Of the user's own functions and kernels, which stand in the same file, it is what is in them: defaults
that the gate always gives, or a hook of a kernel, change the user's forward and no gradient.
"""

from __future__ import annotations

import enum
import itertools
import operator
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

from kernel_agent.gate.known_modules import all_but

_OF_STATES = frozenset(
    {
        "torch.Storage",
        "tempfile.tempdir",
        "mimetypes.inited",
        "torch.distributed.device_mesh._distributed_opaque_types_registered",
    }
)
"""Names that torch itself sets again with a setting, which `lasting_state` looks at, and those that modules set as they
work."""
_SETTINGS = (bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
"""Kinds of values that a program sets a name of a module or a class to."""
_COUNTED = (bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
"""Of these a private name tells that somebody has set it: numbers that are private are counters as often."""
_NAMED = 20
"""Replaced names that are told."""


class _Changed(NamedTuple):
    """A module or a class that holds other values than before."""

    place: str
    space: types.ModuleType | type
    old: Mapping[str, Any]
    now: Mapping[str, Any]


class Watched:
    """What names of modules and classes stood for when this was made, to compare with.

    `own` is the candidate's module with the user's statements done: its names may get other meanings, which are judged.
    """

    def __init__(self, own: types.ModuleType | None = None) -> None:
        self._own = own
        self._modules = dict(sys.modules)
        self._parts = all_but(None if own is None else own.__name__, self._modules, _defined_in(own))
        self._excused: frozenset[str] = frozenset()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """What changes while the block runs is nobody's: the user's own forward may do so."""
        before = self._names()
        yield
        self._excused |= self._names() - before

    def _names(self) -> frozenset[str]:
        changed = list(self._changed())
        return frozenset((*self._exchanged(changed), *self._reset(changed)))

    def replaced(self) -> tuple[str, ...]:
        """Which attributes that could be called then are others now, as `time.perf_counter`.

        An inherited method that was overlaid counts, and so do a special method that a class did not have, the code and
        the defaults of a function, and what the candidate has put into a module that was imported since; other names
        that were added are nobody's.
        """
        return self._told((*self._exchanged(self._changed()), *self._inside_out(), *self._put_in()))

    def reset(self) -> tuple[str, ...]:
        """Which settings are others now: names of modules and classes that stand for a plain value before and after."""
        return self._told(self._reset(self._changed()))

    def _told(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(names) - _OF_STATES - self._excused)[:_NAMED])

    def _exchanged(self, changed: Iterable[_Changed]) -> Iterator[str]:
        for place, space, old, now in changed:
            names = [name for name, value in old.items() if now.get(name) is not value and _calls(value)]
            names = [name for name in names if not _by_itself(place, name, now.get(name))]
            added = [name for name in now.keys() - old.keys() if _takes_effect(space, name)]
            names += [name for name in added if not _of_package(place, now[name])]
            yield from (f"{place}.{name}" for name in names)
        yield from (f"{place}.__name__" for place, one in self._modules.items() if sys.modules.get(place) is not one)

    def _inside_out(self) -> Iterator[str]:
        return (_full_name(function, self._own) for part in self._parts for function in part.exchanged())

    def _reset(self, changed: Iterable[_Changed]) -> Iterator[str]:
        for place, _, old, now in changed:
            for name, value in old.items():
                other = now.get(name)
                kinds = _COUNTED if name.startswith("_") else _SETTINGS
                if other is value or not isinstance(value, kinds) or not isinstance(other, kinds):
                    continue
                if type(value) is not type(other) or value != other:
                    yield f"{place}.{name}"

    def _changed(self) -> Iterator[_Changed]:
        """The spaces that have other values now, with what was in them and what is; few have."""
        for place, space, old in itertools.chain.from_iterable(part.touched() for part in self._parts):
            now = vars(space)
            if len(now) != len(old) or not all(map(operator.is_, old.values(), now.values())):
                yield _Changed(place, space, old, now)

    def _put_in(self) -> Iterator[str]:
        """What the candidate has put into modules that were imported since, and modules that it has made."""
        if self._own is None:
            return
        since = [place for place in sys.modules.keys() - self._modules.keys() if place != self._own.__name__]
        for place in since:
            module = sys.modules[place]
            root: Any = sys.modules.get(place.partition(".")[0])
            spec = getattr(root, "__spec__", None)
            if spec is None or spec.name != place.partition(".")[0]:
                yield f"sys.modules[{place!r}]"
            elif isinstance(module, types.ModuleType):
                yield from (f"{place}.{name}" for name, value in vars(module).items() if self._defines(value))

    def _defines(self, value: Any) -> bool:
        if type(value) is types.FunctionType:
            return value.__globals__ is vars(self._own)
        return issubclass(type(value), type) and vars(value).get("__module__") == getattr(self._own, "__name__", "")


def _calls(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod))


def _defined_in(own: types.ModuleType | None) -> Iterator[Any]:
    """Functions, and kernels under autotuning and the like, that the statements of a module have defined so far."""
    if own is None:
        return
    for value in list(vars(own).values()):
        wrapped = value
        while not isinstance(wrapped, JITFunction) and hasattr(wrapped, "fn"):
            wrapped = wrapped.fn
        if getattr(wrapped, "__module__", None) == own.__name__:
            yield wrapped


def _full_name(function: Any, own: types.ModuleType | None) -> str:
    home = "" if own is not None and function.__module__ == own.__name__ else f"{function.__module__}."
    return f"{home}{function.__qualname__}"


def _by_itself(place: str, name: str, value: Any) -> bool:
    """Whether a package has done so itself: torch wraps `manual_seed` when its compiler is first wanted, and makes
    properties of what its caches hold."""
    own = getattr(value, "fget", None) or value
    return _of_package(place, value) and getattr(own, "__name__", "") in (name, "<lambda>")


def _of_package(place: str, value: Any) -> bool:
    """Whether a value is code of the package that it stands in, which completes itself as parts of it are imported.

    A function that the package has wrapped is not: it runs what it closes over.
    """
    home = getattr(sys.modules.get(place.partition(".")[0]), "__file__", None)
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    code = getattr(value, "__code__", None)
    if home is None or not isinstance(code, types.CodeType):
        return False
    if not code.co_filename.startswith(os.path.dirname(home) + os.sep):
        return False
    held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    return all(_is_library(place, one) for one in held if _calls(one))


def _is_library(place: str, value: Any) -> bool:
    """Whether a callable is Python's or of the package of a place: by its name, its code, or its class and what it
    holds."""
    if isinstance(value, types.BuiltinFunctionType) or _of_package(place, value) or _found(place, value):
        return True
    held = [one for one in getattr(value, "__dict__", {}).values() if _calls(one)]
    made = not isinstance(value, (types.FunctionType, type)) and _found(place, type(value))
    return made and all(_found(place, one) or _of_package(place, one) for one in held)


def _found(place: str, value: Any) -> bool:
    """Whether something stands in a module of the package of a place, or of Python, under its own name. Functions are
    asked for their code: a name can be given to any."""
    if isinstance(value, types.FunctionType):
        return False
    home = getattr(value, "__module__", None) or ""
    known = home.partition(".")[0] in (place.partition(".")[0], *sys.stdlib_module_names)
    return known and getattr(sys.modules.get(home), getattr(value, "__name__", ""), None) is value


def _takes_effect(space: types.ModuleType | type, name: str) -> bool:
    """Whether a name that was added changes what was there: a special method, or one that a base has.

    Python's own caches of classes are no methods.
    """
    if not _calls(vars(space).get(name)):
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(space, type) or name in ("__getattr__", "__dir__")
    return isinstance(space, type) and any(_calls(vars(base).get(name)) for base in space.__mro__[1:-1])
