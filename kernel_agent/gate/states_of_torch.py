"""States of torch and Triton that a file could leave changed: settings, modes, hooks, knobs.

Settings below Python are read by torch's own functions that take nothing and give a plain value, all that there are, so
that one which a later torch adds is looked at without being named here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import triton
from torch.nn.modules import module as torch_modules

OVERRIDDEN_BESIDE = "operators beside torch's that torch.library overrides"
_OVERRIDDEN = "operators that torch.library overrides"
_PLAIN = (bool, int, float, str, torch.device, torch.dtype)
_NOT_ASKED = frozenset({"_get_accelerator", "_get_thread_name", "_is_cow_tensor"})
"""Getters that look for devices, or that tell nothing which a program sets."""
_LIKE_GETTERS = sorted({name for name in vars(torch._C) if name.startswith(("_get_", "_is_"))} - _NOT_ASKED)
"""Found once for all processes: whoever looks at each name of torch's copies a page for many of them."""
_BACKENDS = (
    ("generic", "all"),
    *((name, op) for name in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
)
"""What `fp32_precision` is set for."""
_TORCHS_OWN = frozenset({"aten", "prim", "prims", "debugprims", "c10d", "quantized"})
"""Operators of torch, some of which are defined in Python as those of others are."""


def states_of_calls() -> Iterator[tuple[str, Any]]:
    """What whoever calls a backward sets before it and resets after it."""
    yield "torch.is_grad_enabled()", torch.is_grad_enabled()
    yield "torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled()
    yield "modes of torch functions", torch._C._len_torch_function_stack()
    yield "modes of torch operators", torch._C._len_torch_dispatch_stack()
    yield "hooks of saved tensors", torch._C._autograd._top_saved_tensors_default_hooks(False)


def states_of_torch() -> Iterator[tuple[str, Any]]:
    """All of them by name."""
    yield from states_of_calls()
    yield "torch.get_default_dtype()", str(torch.get_default_dtype())
    yield "torch.get_default_device()", torch.get_default_device()
    yield "torch.initial_seed()", torch.initial_seed()
    yield "torch.get_num_threads()", torch.get_num_threads()
    yield "torch.get_deterministic_debug_mode()", torch.get_deterministic_debug_mode()
    yield "torch.is_anomaly_enabled()", torch.is_anomaly_enabled()
    for device in ("cuda", "cpu"):
        yield f"torch.is_autocast_enabled('{device}')", torch.is_autocast_enabled(device)
        yield f"torch.get_autocast_dtype('{device}')", torch.get_autocast_dtype(device)
    yield "torch.is_autocast_cache_enabled()", torch.is_autocast_cache_enabled()
    yield "torch.set_flush_denormal()", sys.float_info.min / 2 == 0
    yield "torch.set_printoptions()", dict(vars(torch._tensor_str.PRINT_OPTS))
    yield "torch.sparse.check_sparse_tensor_invariants", torch.sparse.check_sparse_tensor_invariants.is_enabled()
    made = torch.serialization.get_safe_globals()  # torch itself adds some with parts that it imports late
    foreign = [one for one in made if not str(getattr(one, "__module__", "")).startswith("torch.")]
    yield "what torch.load may call", frozenset(map(id, foreign))
    yield "how torch.load finds devices", tuple(torch.serialization._package_registry)
    compiling: Any = sys.modules.get("torch._dynamo.eval_frame")  # part of torch that few programs import
    yield "torch.compiler.set_stance()", "default" if compiling is None else str(compiling._stance.stance)
    yield from _flags()
    yield from _hooks()
    yield from _overrides()


def _flags() -> Iterator[tuple[str, Any]]:
    for name, getter in _getters():
        with suppress(RuntimeError, TypeError):
            yield _SAID.get(name, f"torch._C.{name}()"), getter()
    for backend, op in _BACKENDS:
        with suppress(AttributeError, RuntimeError):  # since torch 2.9
            precision = torch._C._get_fp32_precision_getter(backend, op)
            yield (
                f"fp32_precision of {backend} {op}",
                "ieee" if precision == "none" else precision,
            )  # older flags say so
    for name in ("benchmark_limit", "enabled"):
        with suppress(AttributeError, RuntimeError):
            yield f"torch.backends.cudnn.{name}", getattr(torch.backends.cudnn, name)


_SAID = {
    "_get_cublas_allow_tf32": "torch.backends.cuda.matmul.allow_tf32",
    "_get_cudnn_allow_tf32": "torch.backends.cudnn.allow_tf32",
    "_get_cudnn_benchmark": "torch.backends.cudnn.benchmark",
    "_get_cudnn_deterministic": "torch.backends.cudnn.deterministic",
    "_get_flash_sdp_enabled": "torch.backends.cuda.flash_sdp_enabled()",
    "_get_mem_efficient_sdp_enabled": "torch.backends.cuda.mem_efficient_sdp_enabled()",
    "_get_math_sdp_enabled": "torch.backends.cuda.math_sdp_enabled()",
    "_get_cudnn_sdp_enabled": "torch.backends.cuda.cudnn_sdp_enabled()",
    "_get_float32_matmul_precision": "torch.get_float32_matmul_precision()",
    "_is_multithreading_enabled": "torch.autograd.set_multithreading_enabled()",
    "_get_warnAlways": "torch.is_warn_always_enabled()",
    "_get_deterministic_fill_uninitialized_memory": "torch.utils.deterministic.fill_uninitialized_memory",
}
"""What programs know a getter by."""


@functools.cache
def _getters() -> tuple[tuple[str, Callable[[], Any]], ...]:
    """Those of `torch._C` that take nothing and give a plain value, the same when asked twice."""
    found = []
    for name in _LIKE_GETTERS:
        getter = vars(torch._C).get(name)
        if not callable(getter):
            continue
        with suppress(RuntimeError, TypeError, AttributeError, AssertionError):
            value = getter()
            parts = value if isinstance(value, tuple) else (value,)
            if all(isinstance(part, _PLAIN) for part in parts) and value == getter():
                found.append((name, getter))
    return tuple(found)


def _hooks() -> Iterator[tuple[str, Any]]:
    for name, hooks in vars(sys.modules["torch.optim.optimizer"]).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"torch.optim.optimizer.{name}", tuple(hooks.values())
    for name, hooks in vars(torch_modules).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"torch.nn.modules.module.{name}", tuple(hooks.values())


def _overrides() -> Iterator[tuple[str, Any]]:
    own = frozenset(name.partition("::")[0] for name in torch.library._defs) - _TORCHS_OWN
    overridden = {key: key.partition("/")[0] for key in torch.library._impls}
    yield _OVERRIDDEN, frozenset(key for key, space in overridden.items() if space in _TORCHS_OWN)
    yield (
        OVERRIDDEN_BESIDE,
        frozenset(key for key, space in overridden.items() if space not in own | _TORCHS_OWN),
    )


def states_of_triton() -> Iterator[tuple[str, Any]]:
    """Its knobs, with the members of chains of hooks."""
    for group, knobs in vars(triton.knobs).items():
        if not isinstance(knobs, triton.knobs.base_knobs):
            continue
        for name in vars(type(knobs)).keys() | vars(knobs).keys():
            if name.startswith("_"):
                continue
            value = vars(knobs).get(name, vars(type(knobs)).get(name))
            calls: Any = getattr(value, "calls", None)  # of a chain of hooks
            yield f"triton.knobs.{group}.{name}", tuple(calls) if isinstance(calls, list) else value


def objects_of_knobs() -> list[Any]:
    """What Triton's knobs hold, one object after the other: whoever has the same objects has the same knobs."""
    found: list[Any] = []
    for knobs in vars(triton.knobs).values():
        if isinstance(knobs, triton.knobs.base_knobs):
            for value in (*vars(knobs).values(), *vars(type(knobs)).values()):
                calls = getattr(value, "calls", None) if type(value) is triton.knobs.HookChain else None
                found += calls if isinstance(calls, list) else [value]
    return found
