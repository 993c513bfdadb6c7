"""Operators that Python code registered with torch: their GPU kernels are Python functions that launch Triton.

The dispatcher would look at the tensors, find them on the CPU, and refuse. So the function that is registered for the
GPU is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket


def custom_function(func: Any) -> Callable[..., Any] | None:
    """The Python function a custom operator runs on a GPU; None for any other torch function."""
    if isinstance(func, OpOverloadPacket):
        if func._qualified_op_name.startswith(("aten::", "prims::", "prim::")):
            return None
        names = func.overloads()
        func = getattr(func, names[0]) if len(names) == 1 else None
    if not isinstance(func, OpOverload):
        return None
    qualified = func._schema.name
    definition = OPDEFS.get(qualified)
    if definition is not None:
        for_gpu: Callable[..., Any] = definition._backend_fns.get("cuda", definition._init_fn)
        return for_gpu
    space, name = qualified.split("::")
    overload = f"{name}.{func._overloadname}" if func._schema.overload_name else name
    for key in ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if any(f"{space}/{spelled}/{key}" in torch.library._impls for spelled in (name, overload)):
            return _redispatch(func, key)
    return None


def _redispatch(func: OpOverload, key: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any, **kwargs: Any) -> Any:
        return func.redispatch(keys, *args, **kwargs)

    return call
