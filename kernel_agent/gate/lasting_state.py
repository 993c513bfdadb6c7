"""What a candidate has changed in its process that outlasts its calls: settings, hooks, modes, threads.

Its gradients may be right and the user's program another one afterwards: gradients switched off, a seed set again at
every step, a hook that runs at every launch, which no executor calls. Compared is the state before the candidate's
statements and after its last call; no case is run for it. What a caller sets anew for every call, and what hangs on
what a call is given or returns, is looked at around each call, and what Triton is told to compile with at each launch.
"""

from __future__ import annotations

import functools
import operator
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.gate.states_of_python import FILTERS, LOGGER, states_of_python
from kernel_agent.gate.states_of_torch import (
    OVERRIDDEN_BESIDE,
    objects_of_knobs,
    states_of_calls,
    states_of_torch,
    states_of_triton,
)
from kernel_agent.ir import own_attributes
from kernel_agent.ir.launch import Runner

_NAMED = 20
"""Changed states that are told."""
_CALLS_WITHOUT_DRAWS = 8
"""Generators are looked at around one call of so many: that takes longer than all other looks together."""


class LastingState:
    """The state when this was made, to compare with."""

    def __init__(self) -> None:
        _generators()  # what is imported for these looks counts for nobody
        self._before = dict(_states())
        self._knobs = dict(states_of_triton())
        self._looked_at = objects_of_knobs()
        self._modules = frozenset(sys.modules)
        self._excused: frozenset[str] = frozenset()
        self._by_calls: frozenset[str] = frozenset()
        self._calls = 0

    @contextmanager
    def excused(self) -> Iterator[None]:
        """What changes while the block runs is nobody's: the user's own forward may do so."""
        before = dict(_states())
        yield
        self._excused |= _others(before, dict(_states()))

    def attended(self, function: Callable[..., Any], *, may_draw: bool = False) -> Callable[..., Any]:
        """The function; what its calls change of what the caller sets for each of them counts as changed.

        So does what they hang on tensors that they are given or return: it runs wherever those go. Every second call
        begins with gradients enabled, since what is left as it was is not seen. Unless it `may_draw`, generators of
        random numbers must stand where they stood; they are moved on first, since whoever sets a seed again may set
        the one that was set.
        """

        @functools.wraps(function)
        def attended(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            hung = [_hung_on(tensor, numbers=False) for tensor in given]
            draws = not may_draw and self._calls % _CALLS_WITHOUT_DRAWS == 1
            with torch.set_grad_enabled(self._calls % 2 == 0):
                numbers = _moved_generators() if draws else {}
                before = dict(states_of_calls())
                result = function(*args, **kwargs)
                self._by_calls |= _others(before, dict(states_of_calls()))
                now = _generators() if draws else {}
                self._by_calls |= _others(numbers, {name: now[name] for name in numbers})
            more = [_hung_on(tensor, numbers=False) - before for tensor, before in zip(given, hung, strict=True)]
            self._by_calls |= {f"{what} of what it is given" for what in frozenset().union(*more)}
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor) and not any(tensor is one for one in given):
                    self._by_calls |= {f"{what} of what it returns" for what in _hung_on(tensor)}
            return result

        return attended

    def at_launches(self, runner: Runner) -> Runner:
        """The runner; what Triton is set to while a launch runs, which it then compiles with, counts as changed."""

        @functools.wraps(runner)
        def run(*args: Any, **kwargs: Any) -> None:
            now = objects_of_knobs()
            if len(now) != len(self._looked_at) or any(map(operator.is_not, now, self._looked_at)):
                self._by_calls |= _others(self._knobs, dict(states_of_triton()))
            if not _same(self._before["os.environ"], dict(os.environ)):  # knobs that nobody has set are read there
                self._by_calls |= {"os.environ"}
            runner(*args, **kwargs)

        return run

    def changed(self) -> tuple[str, ...]:
        """Which states are others now, as `torch.is_grad_enabled()`.

        What modules of torch that were imported in between do to imports, at exit and to operators that are not torch's
        counts for nobody.
        """
        now = dict(_states())
        made = {name for name in now.keys() - self._before.keys() if name.startswith(LOGGER)}  # for whoever made them
        names = (_others(self._before, now) | self._by_calls) - self._excused - made
        if any(name.startswith("torch.") for name in sys.modules.keys() - self._modules):
            names -= _OF_IMPORTS
        return tuple(sorted(names)[:_NAMED])


def _others(before: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name in before.keys() | now.keys() if not _same(before.get(name), now.get(name)))


_OF_IMPORTS = frozenset({"what runs at exit", "sys.meta_path", "sys.path_hooks", FILTERS, OVERRIDDEN_BESIDE})
"""Torch itself imports its compiler late, as for `torch.stack` of tensors without data, which then overrides operators
of collectives and of distributed tensors."""


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    plain = (bool, int, float, str, bytes, dict, frozenset, torch.device)
    return old is new or (type(old) is type(new) and isinstance(old, plain) and old == new)


def _states() -> Iterator[tuple[str, Any]]:
    yield from states_of_python()
    yield from states_of_torch()
    yield from states_of_triton()


def _moved_generators() -> dict[str, Any]:
    """Where the generators of random numbers stand, one number further than before."""
    numpy = sys.modules.get("numpy")
    random.random()
    if numpy is not None:
        numpy.random.random()
    with torch._C.DisableTorchFunction():
        torch.rand(1)
    return _generators()


def _generators() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    with torch._C.DisableTorchFunction():
        found = {"torch's random numbers": torch.default_generator.get_state().numpy().tobytes()}
    found["Python's random numbers"] = random.getstate()
    if numpy is not None:
        kind, numbers, *place = numpy.random.get_state()
        found["NumPy's random numbers"] = (kind, numbers.tobytes(), *place)
    return found


def _hung_on(tensor: Tensor, *, numbers: bool = True) -> frozenset[str]:
    """What a tensor carries that is no part of one; attributes that are `numbers` or text run nothing."""
    with torch._C.DisableTorchFunction():
        names = vars(tensor).keys() - own_attributes()
        names = {name for name in names if numbers or not _plain(vars(tensor)[name])}
        found = {f"the attribute {name!s:.50}" for name in names}
        found |= {"hooks"} if tensor._backward_hooks else set()
        owned = (tensor, tensor.untyped_storage())
        ends = any(one.__callback__ is not None for part in owned for one in weakref.getweakrefs(part))
        found |= {"finalizers"} if ends else set()
    return frozenset(found)


def _plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_plain, value))
    return type(value) in (bool, int, float, str, type(None), torch.dtype, torch.device)
