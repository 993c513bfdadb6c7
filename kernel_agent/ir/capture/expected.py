"""`expected_of`: what a torch call would return on the GPU, learnt from the same call on meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernel_agent.ir.capture.autocast import autocast
from kernel_agent.ir.capture.device import names_gpu
from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.capture.torch_calls import CallClass, class_of

_UNDECIDED = (RuntimeError, TypeError, ValueError, IndexError)
"""What a call on meta tensors may raise when its result depends on values; the real call then decides."""


_ALIKE = frozenset({"empty_like", "zeros_like", "ones_like"})
"""Functions whose result is told by their argument. Backwards call them most; on meta tensors torch takes long."""


class Same:
    """On meta tensors the call returned one of its arguments, of this dtype and shape."""

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.dtype = dtype
        self.shape = shape


class Fresh(Same):
    """On meta tensors the call returned a new tensor of this dtype and shape."""


def expected_of(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_inputs: bool) -> Any:
    """The result of the same call on meta tensors, each as `Fresh` or `Same`; None when that cannot be told."""
    if name in _ALIKE and len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
        return Fresh(autocast(name, declared_dtype(args[0])), args[0].shape)
    seen: list[Tensor] = []

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            twin = torch.empty_strided(value.size(), value.stride(), dtype=declared_dtype(value), device="meta")
            seen.append(twin)
            return twin
        if names_gpu(value):
            return torch.device("meta")
        return value

    meta_args, meta_kwargs = tree_map(meta, (args, kwargs))
    meta_kwargs.pop("pin_memory", None)
    meta_kwargs.pop("generator", None)
    if name in ("cuda", "cpu"):
        return Same(declared_dtype(args[0]), args[0].shape)
    if not has_inputs and class_of(name, floats=True) is CallClass.ALLOCATION:
        meta_kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            result = func(*meta_args, **meta_kwargs)
    except _UNDECIDED:
        return None

    def describe(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        same = any(value is twin for twin in seen)
        return (Same if same else Fresh)(autocast(name, value.dtype), value.shape)

    return tree_map(describe, result)
