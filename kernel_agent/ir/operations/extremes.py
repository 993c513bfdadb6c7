"""Maximum and minimum along an axis, with a backward that passes over the tile half as often as torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Extremum(torch.autograd.Function):  # type: ignore[misc]
    """Values -> largest or smallest along an axis. Equal extremes share the gradient evenly, as in `Tensor.amax`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: int, largest: bool) -> Tensor:
        """Reduce; NaN wins."""
        result = values.amax(axis) if largest else values.amin(axis)
        ctx.axis = axis
        ctx.save_for_backward(values, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """To where the extreme came from."""
        values, result = ctx.saved_tensors
        result = result.unsqueeze(ctx.axis)
        chosen = values == result
        share = gradient.unsqueeze(ctx.axis) / chosen.sum(ctx.axis, keepdim=True)
        return torch.where(chosen, share, 0.0), None, None


def extremum(values: Tensor, axis: int, *, largest: bool) -> Tensor:
    """Largest or smallest value along an axis; NaN wins."""
    if values.requires_grad and torch.is_grad_enabled():
        return Extremum.apply(values, axis, largest)
    return values.amax(axis) if largest else values.amin(axis)
