"""How a tensor lies in memory: whether its elements have places of their own, and whose memory it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def shares_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the layout may put two indices at one place: dimensions from the narrowest must each step over the last.

    Layouts that interleave and never meet are said to share as well; no kernel has a reason for one.
    """
    if 0 in shape or len(shape) != len(strides):
        return len(shape) != len(strides)
    reach = 0
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie in the order of their indices, without gaps."""
    if 0 in shape or len(shape) != len(strides):
        return len(shape) == len(strides)
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def is_handed_back(value: Tensor, given: Tensor) -> bool:
    """Whether a tensor is an argument of the call as it came, or a part of one whose elements share memory anyhow."""
    if value.untyped_storage()._cdata != given.untyped_storage()._cdata:
        return False
    same = value.data_ptr() == given.data_ptr() and value.size() == given.size() and value.stride() == given.stride()
    return bool(same) or shares_memory(tuple(given.size()), tuple(given.stride()))


def meets(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors, which are not one object, have an element in one place of memory.

    Parts of one buffer need not: which places each has is marked where their ranges overlap.
    """
    if value is other or value.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    unit = math.gcd(value.element_size(), other.element_size())
    spans = sorted(_span(one, unit) for one in (value, other) if one.numel())
    if len(spans) < 2 or spans[0][1] < spans[1][0]:
        return False
    marked = torch.zeros(max(end for _, end in spans) + 1, dtype=torch.bool)
    _places(marked, value, unit).fill_(True)
    return bool(_places(marked, other, unit).any())


def _span(value: Tensor, unit: int) -> tuple[int, int]:
    """The first and the last of so many bytes that a tensor has, counted from the start of its storage."""
    each = value.element_size() // unit
    reach = sum(step * (size - 1) for step, size in zip(value.stride(), value.shape, strict=True))
    return value.storage_offset() * each, (value.storage_offset() + reach + 1) * each - 1


def _places(marked: Tensor, value: Tensor, unit: int) -> Tensor:
    """Of marks for so many bytes each, those of a tensor's elements."""
    each = value.element_size() // unit
    strides = (*(step * each for step in value.stride()), 1)
    return marked.as_strided((*value.size(), each), strides, value.storage_offset() * each)
