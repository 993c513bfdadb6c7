"""Python values as JSON plus named tensors: arguments and outputs travel between processes without pickle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from kernel_agent.errors import InputError

_PLAIN = (bool, int, str, type(None))


def pack(
    value: Any, tensors: MutableMapping[str, Tensor], path: str, *, tensor: Callable[[Tensor], Tensor] = lambda t: t
) -> Any:
    """The JSON form of `value`; its tensors are put into `tensors` under keys that begin with `path`.

    `tensor` maps every tensor before it is stored. Raises `InputError` for a value of a type that cannot travel.
    """
    if isinstance(value, Tensor):
        tensors[path] = tensor(value)
        return {"tensor": path}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        packed = [pack(v, tensors, f"{path}.{i}", tensor=tensor) for i, v in enumerate(value)]
        return packed if isinstance(value, list) else {"tuple": packed}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: pack(v, tensors, f"{path}.{k}", tensor=tensor) for k, v in value.items()}}
    raise InputError(
        f"a {type(value).__name__} cannot be passed to a checked stub",
        remedy="use tensors, numbers, strings, None, dtypes, devices, and lists, tuples or dicts of these",
    )


def unpack(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `pack` was given."""
    if isinstance(form, list):
        return [unpack(v, tensors) for v in form]
    if not isinstance(form, dict):
        return form
    ((kind, inner),) = form.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "float":
        return float(inner)
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "tuple":
        return tuple(unpack(v, tensors) for v in inner)
    return {k: unpack(v, tensors) for k, v in inner.items()}
