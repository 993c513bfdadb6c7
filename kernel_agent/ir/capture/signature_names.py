"""Names for whatever can be called, and for the positional arguments of a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def callable_name(fn: Callable[..., Any]) -> str:
    """What people call it; `SomeFunction.apply` goes by the class."""
    function = _autograd_function(fn)
    if function is not None:
        return str(function.__name__)
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """One name per positional argument of a call; those that fall into `*args` are numbered, `args[0]`.

    For `SomeFunction.apply` they are the parameters of its `forward` behind `ctx`; for a module those of its `forward`.
    """
    given = 0
    while isinstance(fn, functools.partial):
        given, fn = given + len(fn.args), fn.func
    parameters = _parameters(fn)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][given:]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [names[k] if k < len(names) else f"{rest}[{k - len(names)}]" for k in range(count)]


def path_name(path: tuple[Any, ...], names: list[str]) -> str:
    """`x`, `saved[0]`, `options['scale']`: a pytree path below (args, kwargs), given the `argument_names`."""
    in_args = path[0].idx == 0
    top = names[path[1].idx] if in_args else str(path[1].key)
    return top + "".join(str(key) for key in path[2:])


def _autograd_function(fn: Callable[..., Any]) -> Any:
    """The class whose method this is, when it is an autograd function."""
    owner: Any = getattr(fn, "__self__", None)
    return owner if inspect.isclass(owner) and issubclass(owner, torch.autograd.Function) else None


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    function = _autograd_function(fn)
    skipped = 0
    if function is not None and fn.__name__ == "apply":
        with_context = function.setup_context is torch.autograd.Function.setup_context
        fn, skipped = function.forward, int(with_context)
    elif isinstance(fn, torch.nn.Module):
        fn = fn.forward
    try:
        return list(inspect.signature(fn).parameters.values())[skipped:]
    except (TypeError, ValueError):  # builtins have no signature
        return []
