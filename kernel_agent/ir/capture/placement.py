"""Where torch code of a stub is computed when the execution does not run on the CPU.

Everything of such an execution lives on one device, whatever the code names. Random numbers are drawn on the CPU and
moved, so that one seed gives the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernel_agent.ir.memory import CPU

_MADE_IN_PLACE = {"empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "arange", "eye", "linspace"}
_DRAWN = {
    *("rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "randint_like", "bernoulli"),
    *("dropout", "multinomial", "bernoulli_", "normal_", "uniform_", "random_", "exponential_"),
}
_READ_ON_HOST = {"numpy", "__array__", "tensor", "as_tensor", "scalar_tensor", "from_numpy"}


def compute_on(
    device: torch.device, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a torch function whose tensors are on `device`; the tensors of its result are there, too.

    No torch function mode sees the call: a stand-in further out would send it to the CPU.
    """
    with torch._C.DisableTorchFunction():
        if name in _DRAWN or name in _READ_ON_HOST:
            return _through_host(device, name, func, args, kwargs)
        if name in _MADE_IN_PLACE and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            kwargs["device"] = device
        if not _changes_arguments(name) and "out" not in kwargs:
            args, kwargs = _moved((args, kwargs), device)
        return _moved(func(*args, **kwargs), device)


def _changes_arguments(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _through_host(
    device: torch.device, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
    result = func(*host_args, **host_kwargs)
    if _changes_arguments(name):
        return args[0].copy_(result)
    return _moved(result, device)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU
    return value.to(CPU) if isinstance(value, Tensor) else value


def _moved(result: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, result)
