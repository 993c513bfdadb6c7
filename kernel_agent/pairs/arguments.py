"""Calls a user's `make_args` for one SWEEP entry, by the rule all files share. Runs their code: child only."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kernel_agent.errors import InputError
from kernel_agent.pairs.blame import blame, line_in, module_path
from kernel_agent.pairs.spec import Dim, ShapeEntry
from kernel_agent.pairs.timelimit import TimeUp, time_limit

MAKE_ARGS_SECONDS = 20.0
"""Processor seconds for the arguments of one entry."""
OURS = ("device", "dtype", "seed")
"""Parameters that the tool fills in, if make_args names them and the entry does not."""


@dataclass(frozen=True)
class Arguments:
    """One call of the stub."""

    args: tuple[Any, ...]
    """Positional arguments, as make_args returned them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments."""


def build_arguments(module: ModuleType, entry: ShapeEntry, *, device: str | torch.device, seed: int) -> Arguments:
    """Make the stub's arguments for one entry.

    With exactly one required parameter, one that no SWEEP key names, make_args gets the dims as a dict, else as
    keywords. `device`, `dtype` and `seed` are passed only if it names them: `dtype` from the entry, else its own
    default, else torch.float32. Without a `seed` parameter it runs under `torch.manual_seed(seed)`; global generators
    are left as they were.

    Raises `InputError` with the line in the user's file when make_args raises, takes longer than
    `MAKE_ARGS_SECONDS`, cannot take the entry, or returns a tensor whose memory has other signs than its numbers.
    """
    make_args = module.make_args
    dims = {name: _runtime(value) for name, value in entry.dims.items()}
    call_args, call_kwargs = _call(make_args, dims, device, seed, module, entry)
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), time_limit(MAKE_ARGS_SECONDS):
            torch.manual_seed(seed)
            random.seed(seed)
            result = make_args(*call_args, **call_kwargs)
    except TimeUp as error:
        path = module_path(module)
        raise InputError(
            f"make_args takes longer than {MAKE_ARGS_SECONDS:g} s for {entry.label}",
            remedy="Make the arguments of one entry quickly, and let the sizes of the entry say how large they are.",
            path=path,
            line=line_in(error, path),
        ) from error
    except Exception as error:
        what = f"make_args fails for {entry.label}"
        raise blame(error, module, what, "Correct make_args, or this SWEEP entry.") from error
    finally:
        random.setstate(python_state)
    arguments = split_result(result)
    _refuse_lazy(module, entry, arguments)
    return arguments


def _refuse_lazy(module: ModuleType, entry: ShapeEntry, arguments: Arguments) -> None:
    """A kernel reads memory, where torch has put off turning signs: it computes with other numbers than torch shows."""
    for value in tree_leaves((arguments.args, arguments.kwargs)):
        if not isinstance(value, torch.Tensor) or not (value.is_neg() or value.is_conj()):
            continue
        view, call = ("negative", "resolve_neg") if value.is_neg() else ("conjugate", "resolve_conj")
        raise InputError(
            f"make_args returns a lazy {view} view for {entry.label}: its memory, which kernels read, has other signs",
            remedy=f"Return `.{call}()` of it, which writes the numbers to memory.",
            path=module_path(module),
            line=_first_line(module.make_args),
        )


def split_result(result: Any) -> Arguments:
    """Read what make_args returned: (args, kwargs) iff it is a 2-tuple of (tuple or list, dict), else the args."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (tuple, list)):
        args, kwargs = result
        if isinstance(kwargs, dict):
            return Arguments(tuple(args), dict(kwargs))
    if isinstance(result, (tuple, list)):
        return Arguments(tuple(result))
    return Arguments((result,))


def argument_names(stub: Callable[..., Any], arguments: Arguments) -> tuple[str, ...]:
    """The parameter each argument goes to, positional ones first; `args[2]` for the third one a `*args` takes in.

    Raises `TypeError` as a call would when the arguments do not fit the stub.
    """
    signature = inspect.signature(stub)
    signature.bind(*arguments.args, **arguments.kwargs)
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(len(arguments.args) - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (*names[: len(arguments.args)], *arguments.kwargs)


def argument_places(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int | str]:
    """Where the named arguments stand in a call: positional ones by their position, keyword ones by their name.

    `names` come from another entry's call (`KernelSpec.inputs`), which may have had other keywords, in another order.
    """
    return {**dict(zip(names, range(len(args)), strict=False)), **{name: name for name in kwargs}}


def _call(
    make_args: Callable[..., Any],
    dims: dict[str, Any],
    device: str | torch.device,
    seed: int,
    module: ModuleType,
    entry: ShapeEntry,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parameters = inspect.signature(make_args).parameters.values()
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    ours: dict[str, Any] = {"device": device, "seed": seed}
    if "dtype" in named and named["dtype"].default is inspect.Parameter.empty:
        ours["dtype"] = torch.float32
    extra = {name: value for name, value in ours.items() if name in named}
    unnamed = [p for p in named.values() if p.default is p.empty and p.name not in dims and p.name not in OURS]
    others = [p for p in named.values() if p.default is p.empty and p.name in dims and p.name not in OURS]
    if len(unnamed) == 1 and not others:
        if "dtype" in named and "dtype" in dims:
            extra["dtype"] = dims["dtype"]
        if unnamed[0].kind is inspect.Parameter.KEYWORD_ONLY:
            return (), {unnamed[0].name: dims, **extra}
        return (dims,), extra
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    strangers = [name for name in dims if name not in named and name not in OURS]
    line = _first_line(make_args)
    if strangers and not takes_any:
        raise InputError(
            f"make_args has no parameter `{strangers[0]}`, which the SWEEP entry {entry.label} names",
            remedy=f"Add `{strangers[0]}` to make_args or take it out of SWEEP; with one parameter it gets the dict.",
            path=module_path(module),
            line=line,
        )
    if unnamed:
        raise InputError(
            f"make_args wants {', '.join(f'`{p.name}`' for p in unnamed)}, not in the SWEEP entry {entry.label}",
            remedy="Give these names in every SWEEP entry, or give the parameters defaults.",
            path=module_path(module),
            line=line,
        )
    passed = {name: value for name, value in dims.items() if name in named or (takes_any and name not in OURS)}
    return (), {**extra, **passed}


def _first_line(make_args: Callable[..., Any]) -> int | None:
    return inspect.unwrap(make_args).__code__.co_firstlineno if hasattr(make_args, "__code__") else None


def _runtime(value: Dim) -> Any:
    """A stored SWEEP value as the user wrote it: `torch.float16` as text means the dtype."""
    if isinstance(value, str) and value.startswith("torch."):
        found = getattr(torch, value.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else value
    return value
