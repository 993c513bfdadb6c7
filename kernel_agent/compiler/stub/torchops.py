"""Adjoints of the torch functions that stand around launches: views, casts, and sums of partial results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.compiler.stub.flow import EXPANDED, PERMUTED, RESHAPED, SAME, tensors_in
from kernel_agent.compiler.stub.torchrules import spread
from kernel_agent.compiler.stub.trace import TorchSeen

_LIKE_ANOTHER = frozenset({"view_as", "reshape_as", "expand_as", "type_as", "to"})
"""Functions that may be given a second tensor, which they ask for its form alone."""


@dataclass(frozen=True)
class Undo:
    """A contribution to an argument."""

    tensor: Tensor
    text: str


def undone(
    event: TorchSeen, result: Tensor, active: Sequence[Tensor], grad: str, shape: Callable[[Tensor], str]
) -> list[Undo] | None:
    """What a cotangent of a result is for the active arguments; None where that is not known.

    `shape` gives an expression for the shape of a tensor.
    """
    if event.name in ("cat", "concat", "concatenate", "stack"):
        return _parted(event, active, grad, shape)
    if event.name == "broadcast_tensors":
        place = next(n for n, part in enumerate(event.result) if part is result)
        active = [part for part in tensors_in(event.args)[place : place + 1] if any(part is one for one in active)]
    name = event.name
    if name in _LIKE_ANOTHER:
        active = [part for part in active if part is event.args[0]]
    if len(active) != 1:
        return [] if name in _LIKE_ANOTHER else None
    (given,) = active
    if name in SAME:
        return [Undo(given, grad)]
    if name in RESHAPED:
        return [Undo(given, f"{grad}.reshape({shape(given)})")]
    if name in PERMUTED:
        return [Undo(given, f"{grad}.permute({', '.join(map(str, _inverse(event)))})")]
    if name in EXPANDED:
        lead = result.dim() - given.dim()
        axes = [*range(lead), *(lead + a for a in range(given.dim()) if given.shape[a] == 1 != result.shape[lead + a])]
        if not axes:
            return [Undo(given, f"{grad}.reshape({shape(given)})")]
        return [Undo(given, f"{grad}.sum({tuple(axes)}).reshape({shape(given)})")]
    if name == "sum" and given.dim() > 0:
        return [Undo(given, f"{_spread(event, given, grad)}.expand({shape(given)})")]
    return None


def _inverse(event: TorchSeen) -> tuple[int, ...]:
    """The permutation that takes the axes of a result back to those of the argument.

    Axes are told apart by running the function again on a tensor whose extents are all different.
    """
    extents = tuple(range(2, 2 + event.args[0].dim()))
    with torch._C.DisableTorchFunction():
        probe = torch.empty(extents, device="meta")
        made = getattr(probe, event.name)
        turned = made(*event.args[1:], **event.kwargs) if callable(made) else made
    return tuple(turned.shape.index(extent) for extent in extents)


def _parted(event: TorchSeen, active: Sequence[Tensor], grad: str, shape: Callable[[Tensor], str]) -> list[Undo]:
    """The parts of the cotangent of tensors that were put together."""
    axis = event.kwargs.get("dim", event.args[1] if len(event.args) > 1 else 0)
    parts = event.args[0]
    if event.name == "stack":
        split = f"{grad}.unbind({axis})"
    else:
        split = f"{grad}.split([{', '.join(f'{shape(part)}[{axis}]' for part in parts)}], {axis})"
    return [
        Undo(part, f"{split}[{place}]") for place, part in enumerate(parts) if any(part is other for other in active)
    ]


def _spread(event: TorchSeen, given: Tensor, grad: str) -> str:
    """The cotangent of a sum with the axes that it summed as extents of 1."""
    arguments = event.args[1:]
    axes = event.kwargs.get("dim", arguments[0] if arguments else None)
    keep = event.kwargs.get("keepdim", arguments[1] if len(arguments) > 1 else False)
    if axes is None:
        return grad
    return spread(grad, [axes] if isinstance(axes, int) else list(axes), given.dim(), keep=keep)
