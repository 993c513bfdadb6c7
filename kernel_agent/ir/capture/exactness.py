"""Calls whose floats would be torch's default dtype, float32, are made in float64.

torch's default dtype belongs to the whole process, so it is not changed; the arguments of the call are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_CONSTANT_NAMES = (
    "tensor as_tensor scalar_tensor zeros ones empty full rand randn linspace logspace arange eye empty_strided "
    "empty_permuted"
)
"""Allocations whose dtype follows torch's default when none is given."""

_ARITHMETIC_NAMES = (
    "add sub mul div true_divide rsub pow float_power sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sigmoid tanh sin "
    "cos sinh cosh tan asin acos atan atan2 reciprocal erf cumsum cumprod mean std var softmax log_softmax logsumexp "
    "sum prod __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ "
    "__rdiv__ __pow__ __rpow__"
)
"""Functions that turn integers into floats of torch's default dtype."""

_CONSTANTS, _ARITHMETIC = frozenset(_CONSTANT_NAMES.split()), frozenset(_ARITHMETIC_NAMES.split())


def exactly(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which a call computes in float64; `result` is the dtype it would have on the GPU, if known.

    Numbers that become tensors, and integers that become floats, must not be rounded to float32 on the way.
    """
    if result is None or not result.is_floating_point:
        return args, kwargs
    if name in _CONSTANTS and kwargs.get("dtype") is None:
        return args, {**kwargs, "dtype": torch.float64}
    if name == "where":
        return tuple(torch.tensor(part, dtype=torch.float64) if type(part) is float else part for part in args), kwargs
    if name not in _ARITHMETIC or any(
        isinstance(value, Tensor) and value.is_floating_point() for value in tree_leaves((args, kwargs))
    ):
        return args, kwargs
    doubled: tuple[Any, ...] = tree_map(lambda part: part.double() if isinstance(part, Tensor) else part, args)
    return doubled, kwargs
