"""Which functions and classes of other people's modules a candidate has replaced in its process.

A file that patches torch, Triton or the clock does so in the user's program too, once it is delivered. Compared is what
the names stand for, before the file is imported and after its last call, not what its text says.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_ROOTS = frozenset({"builtins", "kernel_agent", "time", "triton"})
_OF_TORCH = frozenset(
    {
        *("torch", "torch._tensor", "torch.autograd", "torch.cuda", "torch.cuda.streams", "torch.nn.functional"),
        *("torch.autograd.function", "torch.overrides", "torch.testing", "torch.testing._comparison"),
    }
)
"""torch has a thousand modules more; these hold what programs and harnesses call."""
_NAMED = 20
"""Replaced names that are told."""


def watch_attributes() -> Callable[[], tuple[str, ...]]:
    """Look now; the result says which attributes that could be called then are others now, as `time.perf_counter`.

    An inherited method that was overlaid counts; other names that were added are nobody's. Modules that are imported in
    between are not compared.
    """
    before = [(place, space, dict(vars(space))) for place, space in _spaces()]

    def replaced() -> tuple[str, ...]:
        found = []
        for place, space, old in before:
            now = vars(space)
            changed = [name for name, value in old.items() if now.get(name) is not value and _calls(value)]
            changed = [name for name in changed if not _by_itself(place, name, now.get(name))]
            if isinstance(space, type) and len(now) != len(old):
                changed += [name for name in now.keys() - old.keys() if _inherits(space, name)]
            found += [f"{place}.{name}" for name in changed]
        return tuple(sorted(found)[:_NAMED])

    return replaced


def _calls(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod))


def _by_itself(place: str, name: str, value: Any) -> bool:
    """Whether a package has done so itself: torch wraps `manual_seed` when its compiler is first wanted."""
    home = getattr(sys.modules[place.partition(".")[0]], "__file__", None)
    code = getattr(value, "__code__", None)
    if home is None or not isinstance(code, types.CodeType) or getattr(value, "__name__", "") != name:
        return False
    return code.co_filename.startswith(os.path.dirname(home) + os.sep)


def _inherits(space: type, name: str) -> bool:
    """Whether a class has a method of this name from a base. Python's own caches of classes are no methods."""
    return any(_calls(vars(base).get(name)) for base in space.__mro__[1:-1])


def _spaces() -> Iterator[tuple[str, types.ModuleType | type]]:
    for place, module in list(sys.modules.items()):
        root = place.partition(".")[0]
        if (root not in _ROOTS and place not in _OF_TORCH) or not isinstance(module, types.ModuleType):
            continue
        yield place, module
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == place:
                yield f"{place}.{name}", value
