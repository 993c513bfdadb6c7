"""Arguments of a call of a user's PyTorch function, ready for autograd: for `surrogate` and `reference`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LeafCall:
    """Copies of the arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: dict[str, Tensor]
    """By the names asked for; the argument itself is a copy of its leaf, which the function may change in place."""


def leaf_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    places: Mapping[str, int | str],
    dtype: torch.dtype | None = torch.float64,
) -> LeafCall:
    """Detach a call's floating tensors and make those at `places` (name -> position or keyword) leaves.

    They become `dtype`; None keeps each its own.
    """
    leaves: dict[str, Tensor] = {}
    names = {place: name for name, place in places.items()}

    def prepared(value: Any, place: int | str) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.clone()
        value = value.detach().to(dtype or value.dtype, copy=True)
        if place not in names:
            return value
        leaves[names[place]] = value.requires_grad_()
        with torch.enable_grad():
            return value.clone()

    given = tuple(prepared(value, i) for i, value in enumerate(args))
    named = {name: prepared(value, name) for name, value in kwargs.items()}
    return LeafCall(given, named, leaves)
