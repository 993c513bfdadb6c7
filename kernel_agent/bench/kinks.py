"""Where a forward has no derivative: elements of a gradient that any convention is right for, and none may be judged.

At x = 0 of |x|, at a computed threshold or a tie of a maximum, the exact gradient is one of several, and a kernel that
rounds stands on the other side. Such an element shows itself: the exact gradient at inputs moved by less than they are
rounded by is another one there, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOVE = 2.0**-22
"""By how much of its size, or of the root mean square of its tensor, an input is moved."""
JUMP = 2.0**-12
"""A change of this share of the gradient is a jump: smooth functions answer a move with one of its own size."""
SHARE = 1e-5
"""Elements of a gradient that may be left out; more are no accident of a few inputs, and none is left out then."""


def moves(x: Tensor, generator: torch.Generator) -> Tensor:
    """By how much each element of an input is moved: shape of `x`, float64, random signs of a CPU's `generator`."""
    exact = x.detach().to(torch.float64)
    signs = (torch.randint(0, 2, tuple(x.shape), generator=generator, dtype=torch.int8) * 2 - 1).to(x.device)
    size = exact.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt() if x.numel() else exact.new_zeros(())
    moved = MOVE * signs * torch.maximum(exact.abs(), size)
    return torch.where(exact.isfinite(), moved, 0.0)


def at_kinks(truth: Tensor, moved: Sequence[Tensor]) -> Tensor | None:
    """Which elements of a gradient stand at a kink, as booleans, given the truths at moved inputs.

    None where there are none, or more than `SHARE` of them (one is always allowed).
    """
    if truth.numel() == 0:
        return None
    found = torch.zeros(truth.shape, dtype=torch.bool, device=truth.device)
    for other in moved:
        found |= jumps(truth, other)
    count = int(found.sum())
    return found if 0 < count <= max(1, int(SHARE * truth.numel())) else None


def jumps(truth: Tensor, other: Tensor, share: float = JUMP) -> Tensor:
    """Which elements of another gradient are further from the truth than rounding brings a smooth one, as booleans:
    than a share of the element, or of the root mean square of all."""
    size = torch.maximum(truth.abs(), truth.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
    other = other.to(truth.device)
    return ((other - truth).abs() > share * size) | (other.isfinite() != truth.isfinite())


def without(given: Tensor, truth: Tensor, kinks: Mapping[str, Tensor], name: str) -> Tensor:
    """A gradient as it is judged: what stands at a kink is taken to be right."""
    found = kinks.get(name)
    if found is None:
        return given
    return torch.where(found.to(given.device), truth.to(given.device, given.dtype), given)


def remarks(label: str, kinks: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What was left out at one entry, said to the reader."""
    return tuple(
        f"{label}: {int(found.sum())} of {found.numel()} elements of the gradient of `{name}` are left out: the "
        "forward has a kink there"
        for name, found in kinks.items()
    )
