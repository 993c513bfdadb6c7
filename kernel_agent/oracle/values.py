"""Other values for the arguments that `make_args` gives: what is right for standard normal inputs alone shows on these.

A clamp that no input reaches, a mean that is about zero, a maximum that is never far away: a backward that forgets
them is exact wherever everything is small and centred. Only arguments that are plain random numbers are changed, since
probabilities, scales, offsets and normalised rows mean something that other values break. The same values in rows that
stand apart show a backward that takes for contiguous what the forward has not made so. Other numbers and seeds beside
the tensors show one that has them in its text instead of taking them from the call: `make_args` may give the same ones
every time. So it may give tensors that hold one number alone, as weights of ones and biases of zeros are; those
without a gradient may be tables that hang together, and stay.

Where inputs are zero or large, formulas that are right elsewhere divide by zero or overflow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_agent.pairs.values import Values

_FEWEST = 8
"""Elements below which nothing can be said of a distribution."""
_GAP = 8
"""Elements between two rows: a multiple of 16 bytes, as descriptors want strides to be."""
_ZEROS = 0.02
"""Part of exact zeros above which they are a pattern: padding, a triangle."""
_WHOLE = (torch.int32, torch.int64)
_LARGE = 1024.0
"""The exponential overflows beyond 709 in float64, and beyond 88 in float32."""
_OF_SEEDS = re.compile(r"seed|philox|(^|_)rng(_|$)")
"""Names of what random numbers begin with."""
_FARTHER = 104_729
"""To another seed: farther than heads and rows are, which kernels add to one."""


def redistribute(arguments: Iterable[Tensor], values: Values) -> int:
    """Change every plain random argument in place, as `values` says; the result is how many were.

    All are judged as they were made: two arguments may be views of one memory, which is then changed once.
    """
    chosen = {_place(argument): argument for argument in arguments if plain_random(argument)}
    for argument in chosen.values():
        wide = argument.to(torch.float64)
        argument.copy_(_redistributed(wide, values))
    return len(chosen)


def other_number(value: Any, name: str = "") -> Any:
    """Three quarters of a float that is neither zero nor infinite, and another seed; anything else as it is.

    Less than it was: probabilities stay probabilities, and an epsilon stays small. Whole numbers are seeds where the
    parameter's `name` says so: what others are for, as sizes, hangs together with the tensors.
    """
    whole = type(value) is int or (isinstance(value, Tensor) and value.dtype in _WHOLE)
    if whole and _OF_SEEDS.search(name.lower()):
        return value + _FARTHER
    return 0.75 * value if type(value) is float and value and math.isfinite(value) else value


def without_constants(arguments: Iterable[Tensor], seed: int) -> int:
    """Make numbers around it, in place, of each tensor of floats that holds one number alone; how many were changed.

    They differ from it by a quarter at most, so that a scale stays one, and around zero they are small.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = {_place(argument): argument for argument in arguments if _constant(argument)}
    for argument in chosen.values():
        drawn = torch.rand(argument.shape, generator=generator, dtype=torch.float64)
        number = argument.to(torch.float64)
        argument.copy_(torch.where(number == 0, (drawn - 0.5) / 2, number * (0.75 + drawn / 2)))
    return len(chosen)


def _constant(argument: Tensor) -> bool:
    if not argument.is_floating_point() or argument.numel() == 0 or _overlaps(argument):
        return False
    wide = argument.detach().to(torch.float64)
    return bool(wide.isfinite().all()) and bool((wide == wide.flatten()[0]).all())


def spaced(arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The arguments with rows apart, where they have rows and memory of their own; the gaps hold NaN."""
    storages = [argument.untyped_storage().data_ptr() for argument in arguments]
    return tuple(
        _spaced(argument) if storages.count(storage) == 1 else argument
        for argument, storage in zip(arguments, storages, strict=True)
    )


def _spaced(argument: Tensor) -> Tensor:
    if argument.dim() < 2 or not argument.is_floating_point() or argument.itemsize < 2 or _overlaps(argument):
        return argument
    width = argument.shape[-1]
    wide = argument.new_full((*argument.shape[:-1], width + _GAP), torch.nan)
    wide[..., :width] = argument
    return wide[..., :width]


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
    if values is Values.LARGE:
        return wide * _LARGE
    if values is Values.ZEROS:
        return _with_zeros(wide)
    return (wide / deviation) ** 3 * deviation if values is Values.HEAVY_TAILED else wide


def _with_zeros(wide: Tensor) -> Tensor:
    made = wide.clone(memory_format=torch.contiguous_format)
    made.view(-1)[::8] = 0
    if made.dim() > 1 and made.numel():
        made.view(-1, made.shape[-1])[1::4] = 0
    return made


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
