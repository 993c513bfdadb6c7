"""Which functions and classes of other people's modules a candidate has replaced in its process.

A file that patches torch, Triton or the clock does so in the user's program too, once it is delivered. Compared is what
the names stand for, before the file is imported and after its last call, not what its text says. Of the user's own
functions and kernels, which stand in the same file, it is what is in them: defaults that the gate always gives, or a
hook of a kernel, change the user's forward and no gradient.
"""

from __future__ import annotations

import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime.jit import JITFunction

_ROOTS = frozenset({"builtins", "kernel_agent", "time", "triton"})
_OF_TORCH = frozenset(
    {
        *("torch", "torch._tensor", "torch.autograd", "torch.cuda", "torch.cuda.streams", "torch.nn.functional"),
        *("torch.autograd.function", "torch.overrides", "torch.testing", "torch.testing._comparison"),
        *(
            "torch.nn.modules.module",
            "torch.optim.optimizer",
            "torch.optim.sgd",
            "torch.optim.adam",
            "torch.optim.adamw",
        ),
    }
)
"""torch has a thousand modules more; these hold what programs and harnesses call."""
_WITH_CODE = frozenset({types.FunctionType, JITFunction})
_OF_STATES = frozenset({"torch.Storage"})
"""Names that torch itself sets again with a setting, which `lasting_state` looks at."""
_NAMED = 20
"""Replaced names that are told."""


def watch_attributes(own: types.ModuleType | None = None) -> Callable[[], tuple[str, ...]]:
    """Look now; the result says which attributes that could be called then are others now, as `time.perf_counter`.

    `own` is the candidate's module with the user's statements done: its names may get other meanings, which are judged.

    An inherited method that was overlaid counts, and so do the code and the defaults of a function; other names that
    were added are nobody's. Modules that are imported in between are not compared.
    """
    before = [(place, space, dict(vars(space))) for place, space in _spaces()]
    functions = {id(value): value for _, _, old in before for value in old.values() if type(value) in _WITH_CODE}
    functions |= {id(value): value for value in _defined_in(own) if type(value) in _WITH_CODE}
    inside = [_inside(value) for value in functions.values()]

    def replaced() -> tuple[str, ...]:
        found = []
        for place, space, old in before:
            now = vars(space)
            changed = [name for name, value in old.items() if now.get(name) is not value and _calls(value)]
            changed = [name for name in changed if not _by_itself(place, name, now.get(name))]
            if isinstance(space, type) and len(now) != len(old):
                changed += [name for name in now.keys() - old.keys() if _inherits(space, name)]
            if isinstance(space, types.ModuleType) and sys.modules.get(place) is not space:
                changed.append("__name__")
            found += [name for name in (f"{place}.{name}" for name in changed) if name not in _OF_STATES]
        others = [look[0] for look in inside if _differ(look, _inside(look[0]))]
        found += [_full_name(function, own) for function in others]
        return tuple(sorted(found)[:_NAMED])

    return replaced


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


def _inside(value: Any) -> tuple[Any, ...]:
    """A function or a kernel, and what can be exchanged in it."""
    if isinstance(value, JITFunction):
        source = (value.raw_src, getattr(value, "src", ""))
        return value, value.fn, value.fn.__code__, *source, vars(value).get("run"), *value.pre_run_hooks
    named = value.__kwdefaults__
    return (value, value.__code__, value.__defaults__, named, *(named or ()), *(named or {}).values())


def _differ(old: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """By identity: what was put in may say of itself that it is equal."""
    return len(old) != len(now) or any(map(operator.is_not, old, now))


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
