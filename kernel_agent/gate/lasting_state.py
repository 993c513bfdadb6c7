"""What a candidate has changed in its process that outlasts its calls: settings, hooks, modes, threads.

Its gradients may be right and the user's program another one afterwards: gradients switched off, a seed set again at
every step, a hook that runs at every launch, which no executor calls. Compared is the state before the candidate's
statements and after its last call; no case is run for it. What a caller sets anew for every call, and what hangs on
what a call is given or returns, is looked at around each call, and what Triton is told to compile with at each launch.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import operator
import os
import random
import resource
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_leaves

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
        self._knobs = dict(_of_triton())
        self._looked_at = _objects_of_knobs()
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
                before = dict(_of_calls())
                result = function(*args, **kwargs)
                self._by_calls |= _others(before, dict(_of_calls()))
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
            now = _objects_of_knobs()
            if len(now) != len(self._looked_at) or any(map(operator.is_not, now, self._looked_at)):
                self._by_calls |= _others(self._knobs, dict(_of_triton()))
            if not _same(self._before["os.environ"], dict(os.environ)):  # knobs that nobody has set are read there
                self._by_calls |= {"os.environ"}
            runner(*args, **kwargs)

        return run

    def changed(self) -> tuple[str, ...]:
        """Which states are others now, as `torch.is_grad_enabled()`.

        What modules of torch that were imported in between do to imports, at exit and to operators that are not torch's
        counts for nobody.
        """
        names = (_others(self._before, dict(_states())) | self._by_calls) - self._excused
        if any(name.startswith("torch.") for name in sys.modules.keys() - self._modules):
            names -= _OF_IMPORTS
        return tuple(sorted(names)[:_NAMED])


def _others(before: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name in before.keys() | now.keys() if not _same(before.get(name), now.get(name)))


_OVERRIDDEN = "operators that torch.library overrides"
_OVERRIDDEN_BESIDE = "operators beside torch's that torch.library overrides"
_OF_IMPORTS = frozenset({"what runs at exit", "sys.meta_path", "sys.path_hooks", _OVERRIDDEN_BESIDE})
"""Torch itself imports its compiler late, as for `torch.stack` of tensors without data, which then overrides operators
of collectives and of distributed tensors."""


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    plain = (bool, int, float, str, bytes, dict, frozenset, torch.device)
    return old is new or (type(old) is type(new) and isinstance(old, plain) and old == new)


def _states() -> Iterator[tuple[str, Any]]:
    yield from _of_python()
    yield from _of_torch()
    yield from _of_triton()


def _of_python() -> Iterator[tuple[str, Any]]:
    yield "os.environ", dict(os.environ)
    yield "os.getcwd()", os.getcwd()
    yield "what runs at exit", atexit._ncallbacks()
    yield "gc.callbacks", tuple(gc.callbacks)
    yield "gc.isenabled()", gc.isenabled()
    yield "gc.get_threshold()", gc.get_threshold()
    yield "warnings.showwarning", warnings.showwarning
    yield "logging.disable()", logging.root.manager.disable
    yield "logging.root", (logging.root.level, tuple(logging.root.handlers), logging.root.disabled)
    yield "sys.gettrace()", sys.gettrace()
    yield "sys.getprofile()", sys.getprofile()
    yield "threading.gettrace()", threading.gettrace()
    yield "threading.getprofile()", threading.getprofile()
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None:
        yield "sys.monitoring", tuple(monitoring.get_tool(number) for number in range(6))
    for name in ("meta_path", "path_hooks"):
        yield f"sys.{name}", tuple(getattr(sys, name))
    for name in ("excepthook", "unraisablehook", "displayhook", "stdout", "stderr", "stdin"):
        yield f"sys.{name}", getattr(sys, name)
    yield "sys.path", tuple(sys.path)
    yield "sys.getrecursionlimit()", sys.getrecursionlimit()
    yield "signal handlers", tuple(signal.getsignal(number) for number in sorted(signal.valid_signals()))
    yield "blocked signals", frozenset(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    yield "running threads", frozenset(sys._current_frames())
    yield "resource limits", tuple(resource.getrlimit(number) for number in range(resource.RLIMIT_NOFILE + 1))
    yield "the processors it may use", frozenset(os.sched_getaffinity(0))
    yield "its priority", os.getpriority(os.PRIO_PROCESS, 0)
    yield "running timers", tuple(signal.getitimer(which)[0] > 0 for which in _TIMERS)
    mask = os.umask(0o077)
    os.umask(mask)
    yield "os.umask()", mask


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


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


def _of_calls() -> Iterator[tuple[str, Any]]:
    """What whoever calls a backward sets before it and resets after it."""
    yield "torch.is_grad_enabled()", torch.is_grad_enabled()
    yield "torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled()
    yield "modes of torch functions", torch._C._len_torch_function_stack()
    yield "modes of torch operators", torch._C._len_torch_dispatch_stack()
    yield "hooks of saved tensors", torch._C._autograd._top_saved_tensors_default_hooks(False)


def _hung_on(tensor: Tensor, *, numbers: bool = True) -> frozenset[str]:
    """What a tensor carries that is no part of one; attributes that are `numbers` or text run nothing."""
    with torch._C.DisableTorchFunction():
        names = vars(tensor).keys() - own_attributes()
        names = {name for name in names if numbers or not _plain(vars(tensor)[name])}
        found = {f"the attribute {name!s:.50}" for name in names}
        found |= {"hooks"} if tensor._backward_hooks else set()
        found |= {"finalizers"} if any(one.__callback__ is not None for one in weakref.getweakrefs(tensor)) else set()
    return frozenset(found)


def _plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_plain, value))
    return type(value) in (bool, int, float, str, type(None), torch.dtype, torch.device)


def _of_torch() -> Iterator[tuple[str, Any]]:
    yield from _of_calls()
    yield "torch.get_default_dtype()", str(torch.get_default_dtype())
    yield "torch.get_default_device()", torch.get_default_device()
    yield "torch.initial_seed()", torch.initial_seed()
    yield "torch.get_num_threads()", torch.get_num_threads()
    yield "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision()
    yield "torch.get_deterministic_debug_mode()", torch.get_deterministic_debug_mode()
    yield "torch.is_anomaly_enabled()", torch.is_anomaly_enabled()
    for device in ("cuda", "cpu"):
        yield f"torch.is_autocast_enabled('{device}')", torch.is_autocast_enabled(device)
        yield f"torch.get_autocast_dtype('{device}')", torch.get_autocast_dtype(device)
    yield "torch.is_autocast_cache_enabled()", torch.is_autocast_cache_enabled()
    yield "torch.autograd.set_multithreading_enabled()", torch._C._is_multithreading_enabled()
    yield "torch.set_flush_denormal()", sys.float_info.min / 2 == 0
    yield "torch.set_printoptions()", dict(vars(torch._tensor_str.PRINT_OPTS))
    made = torch.serialization.get_safe_globals()  # torch itself adds some with parts that it imports late
    foreign = [one for one in made if not str(getattr(one, "__module__", "")).startswith("torch.")]
    yield "what torch.load may call", frozenset(map(id, foreign))
    compiling: Any = sys.modules.get("torch._dynamo.eval_frame")  # part of torch that few programs import
    yield "torch.compiler.set_stance()", "default" if compiling is None else str(compiling._stance.stance)
    for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"):
        yield f"torch.backends.cuda.{name}_enabled()", getattr(torch.backends.cuda, f"{name}_enabled")()
    for name, hooks in vars(sys.modules["torch.optim.optimizer"]).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"torch.optim.optimizer.{name}", tuple(hooks.values())
    for name, hooks in vars(torch_modules).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"torch.nn.modules.module.{name}", tuple(hooks.values())
    for place, names in _FLAGS.items():
        flags: Any = torch.backends
        for part in place.split("."):
            flags = getattr(flags, part)
        for name in names:
            with suppress(AttributeError, RuntimeError):  # which flags there are depends on the version and the build
                yield f"torch.backends.{place}.{name}", getattr(flags, name)
    own = frozenset(name.partition("::")[0] for name in torch.library._defs) - _TORCHS_OWN
    overridden = {key: key.partition("/")[0] for key in torch.library._impls}
    yield _OVERRIDDEN, frozenset(key for key, space in overridden.items() if space in _TORCHS_OWN)
    yield (
        _OVERRIDDEN_BESIDE,
        frozenset(key for key, space in overridden.items() if space not in own | _TORCHS_OWN),
    )


_FLAGS = {
    "cuda.matmul": (
        *("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
        "allow_fp16_accumulation",
    ),
    "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
}
_TORCHS_OWN = frozenset({"aten", "prim", "prims", "debugprims", "c10d", "quantized"})
"""Operators of torch, some of which are defined in Python as those of others are."""


def _of_triton() -> Iterator[tuple[str, Any]]:
    for group, knobs in vars(triton.knobs).items():
        if not isinstance(knobs, triton.knobs.base_knobs):
            continue
        for name in vars(type(knobs)).keys() | vars(knobs).keys():
            if name.startswith("_"):
                continue
            value = vars(knobs).get(name, vars(type(knobs)).get(name))
            calls: Any = getattr(value, "calls", None)  # of a chain of hooks
            yield f"triton.knobs.{group}.{name}", tuple(calls) if isinstance(calls, list) else value


def _objects_of_knobs() -> list[Any]:
    """What Triton's knobs hold, one object after the other: whoever has the same objects has the same knobs."""
    found: list[Any] = []
    for knobs in vars(triton.knobs).values():
        if isinstance(knobs, triton.knobs.base_knobs):
            for value in (*vars(knobs).values(), *vars(type(knobs)).values()):
                calls = getattr(value, "calls", None) if type(value) is triton.knobs.HookChain else None
                found += calls if isinstance(calls, list) else [value]
    return found
