"""Other values for the arguments that `make_args` gives: what is right for standard normal inputs alone shows on these.

A clamp that no input reaches, a mean that is about zero, a maximum that is never far away: a backward that forgets
them is exact wherever everything is small and centred. Only arguments that are plain random numbers are changed, since
probabilities, scales, offsets and normalised rows mean something that other values break.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernel_agent.pairs.values import Values

_FEWEST = 8
"""Elements below which nothing can be said of a distribution."""
_ZEROS = 0.02
"""Part of exact zeros above which they are a pattern: padding, a triangle."""


def redistribute(arguments: Iterable[Tensor], values: Values) -> int:
    """Change every plain random argument in place, as `values` says; the result is how many were.

    All are judged as they were made: two arguments may be views of one memory, which is then changed once.
    """
    chosen = {_place(argument): argument for argument in arguments if plain_random(argument)}
    for argument in chosen.values():
        wide = argument.to(torch.float64)
        argument.copy_(_redistributed(wide, values))
    return len(chosen)


def plain_random(argument: Tensor) -> bool:
    """Whether a floating tensor looks like random numbers around zero that nothing ties to each other."""
    if argument.numel() < _FEWEST or not argument.is_floating_point() or _overlaps(argument):
        return False
    wide = argument.detach().to(torch.float64)
    if not bool(wide.isfinite().all()) or bool((wide == wide.round()).all()):
        return False
    deviation, count = float(wide.std()), wide.numel()
    centred = abs(float(wide.mean())) <= max(0.1, 4 / count**0.5) * deviation
    zeros = int((wide == 0).sum())
    return centred and bool((wide < 0).any()) and zeros <= max(1, _ZEROS * count) and not _normalised(wide)


def _redistributed(wide: Tensor, values: Values) -> Tensor:
    deviation = wide.std()
    if values is Values.SHIFTED:
        return wide + 3 * deviation
    if values is Values.SCALED:
        return wide * 4
    return (wide / deviation) ** 3 * deviation if values is Values.HEAVY_TAILED else wide


def _normalised(wide: Tensor) -> bool:
    """Whether all rows have one norm: then they are directions, not numbers."""
    if wide.dim() < 2 or wide.shape[-1] == 1 or wide.numel() == wide.shape[-1]:
        return False
    norms = wide.norm(dim=-1)
    return bool(norms.max() <= 1.01 * norms.min())


def _overlaps(argument: Tensor) -> bool:
    """Whether several indices may share an element."""
    return any(step == 0 and size > 1 for size, step in zip(argument.shape, argument.stride(), strict=True))


def _place(argument: Tensor) -> tuple[object, ...]:
    return argument.data_ptr(), argument.shape, argument.stride()
